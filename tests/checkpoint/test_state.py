"""Which rank saves what, and random states."""

from __future__ import annotations

import json

import pytest
import torch

from slurm_pt.checkpoint.random_state import capture_random_state, restore_random_state
from slurm_pt.checkpoint.state import HostBuffers, fingerprint, names_to_save
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.shard import WHOLE, Fragment, Shard
from slurm_pt.plan.layout import ParallelLayout, Place

TENSORS = {f"weight.{n}": torch.zeros(10 + n, 4) for n in range(8)}
TENSORS |= {f"norm.{n}": torch.zeros(4) for n in range(8)}


def shards(tp, tp_rank=0):
    rows = Shard.over(0, tp=tp, tp_rank=tp_rank)
    return {name: rows if name.startswith("weight") else WHOLE for name in TENSORS}


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 4), (2, 1), (2, 3), (4, 2)])
def test_each_tensor_is_saved_once_and_every_part_of_a_split_one(tp, dp):
    layout = ParallelLayout(tp=tp, pp=1, dp=dp)
    shares = {
        (place.tp_rank, place.dp_rank): names_to_save(
            TENSORS, shards(tp, place.tp_rank), layout=layout, place=place
        )
        for place in map(layout.place, range(layout.world_size))
    }
    for name, shard in shards(tp).items():
        writers = [writer for writer, names in shares.items() if name in names]
        if not shard.split:
            assert len(writers) == 1
        else:  # all parts, from one copy of the model
            assert sorted(tp_rank for tp_rank, _ in writers) == list(range(tp))
            assert len({dp_rank for _, dp_rank in writers}) == 1
    loads = [sum(TENSORS[name].nbytes for name in names) for names in shares.values()]
    # Greedy filling is uneven by one tensor at most; the largest is 17 x 4 of 4 bytes.
    assert max(loads) - min(loads) <= 17 * 4 * 4


def test_of_ranks_that_hold_the_same_part_one_saves_it():
    layout = ParallelLayout(tp=4, pp=1, dp=1)
    tensors = {"key": torch.zeros(2, 2)}
    saved = [
        names_to_save(
            tensors,
            {"key": Shard.over(0, tp=4, tp_rank=rank, parts=2)},
            layout=layout,
            place=layout.place(rank),
        )
        for rank in range(4)
    ]
    assert saved == [["key"], [], ["key"], []]


def test_the_stages_of_a_pipeline_share_by_their_own_tensors():
    layout = ParallelLayout(tp=1, pp=2, dp=2)
    saved = [
        names_to_save(TENSORS, {}, layout=layout, place=Place(0, stage, dp))
        for stage in (0, 1)
        for dp in (0, 1)
    ]
    assert saved[:2] == saved[2:]


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 3)])
def test_each_replica_saves_its_own_fragments_and_ranks_that_hold_the_same_save_once(tp, dp):
    layout = ParallelLayout(tp=tp, pp=1, dp=dp)
    writers: dict[str, list[tuple[int, int]]] = {name: [] for name in TENSORS}
    prints = set()
    for place in map(layout.place, range(layout.world_size)):
        tensors, fragments = {}, {}
        for name, shard in shards(tp, place.tp_rank).items():
            part = TENSORS[name]
            # The last replica has nothing, the others have equal parts.
            share = part.numel() // (dp - 1)
            numbers = range(share * place.dp_rank, min(part.numel(), share * (place.dp_rank + 1)))
            numbers = range(0) if place.dp_rank == dp - 1 else numbers
            tensors[name] = torch.zeros(len(numbers))
            fragments[name] = Fragment.of(shard, part.shape, numbers)
        prints.add(fingerprint(tensors, fragments))
        for name in names_to_save(tensors, fragments, layout=layout, place=place):
            writers[name].append((place.tp_rank, place.dp_rank))
    assert len(prints) == 1
    for name, shard in shards(tp).items():
        tp_ranks = {tp_rank for tp_rank, _ in writers[name]}
        assert len(tp_ranks) == (tp if shard.split else 1)
        assert sorted(writers[name]) == [(t, d) for t in sorted(tp_ranks) for d in range(dp - 1)]


def test_fingerprints_differ_by_name_shape_format_and_shard_dim():
    one = fingerprint({"a": torch.zeros(2, 2)}, {"a": WHOLE})
    others = [
        fingerprint({"b": torch.zeros(2, 2)}, {}),
        fingerprint({"a": torch.zeros(4, 1)}, {}),
        fingerprint({"a": torch.zeros(2, 2, dtype=torch.bfloat16)}, {}),
        fingerprint({"a": torch.zeros(2, 2)}, {"a": Shard(0, 2, 1)}),
        fingerprint({"a": torch.zeros(2, 2)}, {"a": Shard(0, 4, 1)}),
    ]
    assert len({one, *others}) == 6
    second = fingerprint({"a": torch.zeros(2, 2)}, {"a": Shard(0, 4, 0)})
    assert second == others[-1]  # ranks hold different parts of the same
    assert fingerprint({"a": torch.ones(2, 2)}, {}) == one


def test_host_copies_do_not_follow_the_tensors_and_their_memory_is_used_again():
    buffers = HostBuffers()
    weight = torch.ones(4, 4)
    first = buffers.copy({"a": weight, "old": torch.ones(1)})
    weight.zero_()
    assert bool((first["a"] == 1).all())
    second = buffers.copy({"a": weight})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second.keys() == {"a"}
    assert buffers.copy({"a": torch.ones(2)})["a"].shape == (2,)


def test_a_random_state_survives_json():
    """F54."""
    torch.manual_seed(3)
    state = json.loads(json.dumps(capture_random_state()))
    drawn = torch.randn(4)
    restore_random_state(state)
    assert torch.equal(torch.randn(4), drawn)


def test_a_random_state_of_more_devices_than_there_are_is_refused():
    """F54: state of devices is never dropped in silence."""
    state = capture_random_state()
    state["cuda"] = ["AAAA"] * (torch.cuda.device_count() + 1)
    with pytest.raises(CheckpointError, match="are visible"):
        restore_random_state(state)
