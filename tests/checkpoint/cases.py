"""What the ranks of the tests in this folder do; run by tests.ranks."""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slurm_pt.checkpoint import store
from slurm_pt.checkpoint.peers import LostRankError
from slurm_pt.checkpoint.random_state import capture_random_state, restore_random_state
from slurm_pt.checkpoint.tensor_index import read_index
from slurm_pt.devcluster import wait_until
from slurm_pt.errors import CheckpointError, RunFolderError
from tests.checkpoint.toy import (
    Events,
    assert_is_step,
    checkpointer,
    groups_of,
    local_tensors,
    save_step,
    zeros_like,
)

Degrees = tuple[int, int, int]


def several(folder: Path, names: list[str]) -> dict[str, Any]:
    """What each of these cases returns, in a folder of its own: one launch for all of them."""
    return {name: globals()[name](folder / name) for name in names}


def what_one_rank_saves(folder: Path, formats: Path) -> None:
    """All that one rank has to do first, in one launch."""
    save_layouts(folder, [(1, 1, 1)])
    every_number_format(formats)


def save_then_load(
    folder: Path, own: list[Degrees], saved: list[Degrees], layouts: list[Degrees]
) -> int:
    """`save_layouts` and `load_layouts`."""
    save_layouts(folder, own)
    return load_layouts(folder, saved, layouts)


def save_layouts(folder: Path, layouts: list[Degrees]) -> None:
    """One checkpoint of step 7 for each layout, in a folder of its own."""
    for degrees in layouts:
        groups = groups_of(*degrees)
        saver = checkpointer(folder / "x".join(map(str, degrees)), groups)
        save_step(saver, groups, 7)
        assert saver.last_committed == 7
        groups.close()


def load_layouts(folder: Path, saved: list[Degrees], layouts: list[Degrees]) -> int:
    """Every saved checkpoint loaded into every layout; the number of loads."""
    for degrees in layouts:
        groups = groups_of(*degrees)
        for saved_degrees in saved:
            path = folder / "x".join(map(str, saved_degrees))
            tensors, shards = local_tensors(groups)
            tensors = zeros_like(tensors)
            resumed = checkpointer(path, groups).resume(tensors, shards=shards)
            assert resumed is not None
            assert_is_step(tensors, groups, 7)
            assert resumed.step == 7
            assert resumed.common == {"data_position": 70}
            same = degrees == saved_degrees
            assert resumed.world_changed is not same
            assert resumed.rank_state == ({"rank": groups.rank, "step": 7} if same else None)
        groups.close()
    return len(saved) * len(layouts)


def random_state_of_each_rank(folder: Path) -> list[float]:
    """What each generator gives after the save must come again after the load."""
    groups = groups_of(2, 1, 2)
    random.seed(groups.rank)
    np.random.seed(groups.rank)
    torch.manual_seed(groups.rank)
    torch.randn(3), random.gauss(0, 1), np.random.standard_normal(3)
    saver = checkpointer(folder, groups)
    tensors, shards = local_tensors(groups, 1)
    state = {"random": capture_random_state()}
    saver.save(1, tensors, shards=shards, rank_state=state, common={}, wait=True)
    drawn = _draw()
    torch.manual_seed(99)
    _draw()
    resumed = checkpointer(folder, groups).resume(tensors, shards=shards)
    assert resumed is not None
    assert resumed.rank_state is not None
    restore_random_state(resumed.rank_state["random"])
    assert _draw() == drawn
    return drawn


def _draw() -> list[float]:
    return [random.gauss(0, 1), float(np.random.standard_normal()), torch.randn(1).item()]


def fall_back_together(folder: Path) -> list[str]:
    """Steps 1 and 2 saved, a bit of 2 flipped: all ranks load 1. Returns the reasons."""
    groups = groups_of(2, 2, 1)
    saver = checkpointer(folder, groups)
    save_step(saver, groups, 1)
    save_step(saver, groups, 2)
    if groups.rank == 0:
        flip_a_bit(folder / "step_00000002" / "rank_00003.safetensors")
    dist.barrier()
    events = Events()
    tensors, shards = local_tensors(groups)
    later = checkpointer(folder, groups, report=events)
    resumed = later.resume(tensors, shards=shards)
    assert resumed is not None
    assert resumed.step == later.last_committed == 1
    assert_is_step(tensors, groups, 1)
    assert events.names() == ["checkpoint_skipped"]
    # The step is reached again: the damaged one makes way, and is kept to be looked at.
    save_step(later, groups, 2)
    assert later.last_committed == 2
    if groups.rank == 0:
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["step_00000001", "step_00000002", "step_00000002.damaged-1"]
    tensors, shards = local_tensors(groups)
    again = checkpointer(folder, groups).resume(tensors, shards=shards)
    assert again is not None
    assert again.step == 2
    # A third save of it leaves the files as they are.
    before = _stamps(folder)
    save_step(checkpointer(folder, groups), groups, 2)
    assert _stamps(folder) == before
    for step in (1, 2):
        if groups.rank == 0:
            flip_a_bit(folder / f"step_{step:08d}" / "tensors.json")
    dist.barrier()
    with pytest.raises(CheckpointError, match="none can be used"):
        checkpointer(folder, groups).resume(tensors, shards=shards)
    return list(resumed.skipped)


def _stamps(folder: Path) -> dict[str, int]:
    dist.barrier()
    stamps = {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
    dist.barrier()  # nobody goes on to change the files while another still looks
    return stamps


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def full_disk_on_one_rank(folder: Path) -> str:
    """Rank 2 may not write more than 100 bytes to a file; all ranks must get over it."""
    groups = groups_of(2, 1, 2)
    events = Events()
    saver = checkpointer(folder, groups, report=events)
    save_step(saver, groups, 1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if groups.rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    save_step(saver, groups, 2, wait=False)
    save_step(saver, groups, 3, wait=False)  # a failed periodic save does not end training
    with pytest.raises(CheckpointError, match=r"rank 2: .*File too large"):
        saver.wait()
    saver.wait()  # told once
    assert saver.last_committed == 1
    with pytest.raises(CheckpointError) as raised:
        save_step(saver, groups, 4, wait=True)
    dist.barrier()
    assert [stored.step for stored in store.list_checkpoints(folder)] == [1]
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    assert events.names() == ["checkpoint_committed"] + 3 * ["checkpoint_failed"]
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    save_step(saver, groups, 5)
    assert saver.last_committed == 5
    return str(raised.value)


def a_rank_that_never_comes(folder: Path) -> tuple[float, str]:
    """Rank 1 does not save. Returns how long this rank waited, and what it was told."""
    groups = groups_of(1, 1, 4)
    saver = checkpointer(folder, groups, entry_timeout_s=1.0)
    began = time.monotonic()
    if groups.rank == 1:  # alive, and elsewhere, until the others have given up
        gave_up = [folder / f"gave-up-{rank}" for rank in (0, 2, 3)]
        assert wait_until(lambda: all(path.exists() for path in gave_up), timeout_s=60)
        return 0.0, ""
    with pytest.raises(LostRankError) as raised:
        save_step(saver, groups, 1)
    waited = time.monotonic() - began
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gave-up-{groups.rank}").touch()
    with pytest.raises(LostRankError):  # at once: the group cannot be trusted any more
        save_step(saver, groups, 2, wait=False)
    return waited, str(raised.value)


def ranks_save_different_steps(folder: Path) -> str:
    groups = groups_of(1, 1, 2)
    saver = checkpointer(folder, groups)
    with pytest.raises(LostRankError) as raised:
        save_step(saver, groups, 5 + groups.rank)
    return str(raised.value)


def another_job_owns_the_run(folder: Path) -> None:
    """Ownership is lost between the start of a save and its commit."""
    asked: list[int] = []

    def may_commit() -> None:
        asked.append(1)
        if len(asked) == 4:  # two for step 1, one at the start of step 2
            raise RunFolderError("job 77 owns the run")

    groups = groups_of(1, 1, 2)
    saver = checkpointer(folder, groups, may_commit=may_commit)
    save_step(saver, groups, 1)
    save_step(saver, groups, 2, wait=False)
    with pytest.raises(RunFolderError, match="job 77"):
        save_step(saver, groups, 3, wait=False)
    assert [stored.step for stored in store.list_checkpoints(folder)] == [1]


def tensors_that_do_not_fit(folder: Path) -> dict[str, str]:
    """What is said about a checkpoint of another model."""
    groups = groups_of(2, 1, 1)
    save_step(checkpointer(folder, groups), groups, 1)

    def message(change: Any) -> str:
        tensors, shards = local_tensors(groups)
        change(tensors, shards)
        untouched = {name: tensor.clone() for name, tensor in tensors.items()}
        with pytest.raises(CheckpointError) as raised:
            checkpointer(folder, groups).resume(tensors, shards=shards)
        assert all(torch.equal(tensors[name], untouched[name]) for name in tensors)
        return str(raised.value)

    name = "optimizer.exp_avg.layers.1.up.weight"
    return {
        "shape": message(lambda tensors, _: tensors.update({name: torch.zeros(12, 7)})),
        "format": message(
            lambda tensors, _: tensors.update({name: tensors[name].to(torch.bfloat16)})
        ),
        "missing": message(lambda tensors, _: tensors.update({"new.weight": torch.zeros(3)})),
        "extra": message(lambda tensors, _: tensors.pop(name)),
    }


def ranks_of_a_stage_differ(folder: Path) -> str:
    groups = groups_of(1, 1, 2)
    tensors, shards = local_tensors(groups, 1)
    if groups.rank == 1:
        del tensors["optimizer.exp_avg.layers.1.up.weight"]
    with pytest.raises(CheckpointError) as raised:
        checkpointer(folder, groups).save(
            1, tensors, shards=shards, rank_state={}, common={}, wait=True
        )
    return str(raised.value)


def training_goes_on_during_saves(folder: Path) -> int:
    """Collectives of training beside those of saves, whose events cannot even be recorded."""

    def record_on_a_full_disk(event: str, figures: dict[str, Any]) -> None:
        raise OSError("No space left on device")

    groups = groups_of(2, 1, 2)
    saver = checkpointer(folder, groups, keep_last=2, report=record_on_a_full_disk)
    flag = torch.ones(1)
    for step in range(1, 6):
        tensors, shards = local_tensors(groups, step)
        saver.save(step, tensors, shards=shards, rank_state={}, common={}, wait=False)
        for tensor in tensors.values():
            tensor.zero_()  # the next training step writes to the weights at once
        for _ in range(20):
            dist.all_reduce(flag, group=groups.tp)
            dist.all_reduce(flag)
    saver.close()
    dist.barrier()
    assert [stored.step for stored in store.list_checkpoints(folder)] == [5, 4]
    tensors, shards = local_tensors(groups)
    resumed = checkpointer(folder, groups).resume(tensors, shards=shards)
    assert resumed is not None
    assert_is_step(tensors, groups, 5)
    return resumed.step


def every_number_format(folder: Path) -> None:
    """All formats, a number without dims, a tensor without elements, and views into another."""
    groups = groups_of(1, 1, 1)
    fused = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    tensors = {
        **{str(dtype): torch.arange(5).to(dtype) for dtype in FORMATS},
        "bool": torch.tensor([True, False, True]),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "no rows": torch.empty(0, 4),
        "no columns": torch.empty(4, 0),
        "view.rows": fused[2:4],
        "view.columns": fused[:, 1:3],
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpointer(folder, groups).save(1, tensors, shards={}, rank_state={}, common={}, wait=True)
    for name in tensors.keys() - {"view.rows", "view.columns"}:
        tensors[name].zero_()
    fused.zero_()
    assert checkpointer(folder, groups).resume(tensors, shards={}) is not None
    for name, tensor in tensors.items():
        same = tensor.view(torch.uint8) if tensor.dim() else tensor
        expected = before[name].view(torch.uint8) if tensor.dim() else before[name]
        assert torch.equal(same, expected), name
    assert fused[2, 1] == 9  # through the view into the tensor it is of


FORMATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


def tensors_known_only_from_the_checkpoint(folder: Path) -> int | None:
    groups = groups_of(1, 1, 2)
    saver = checkpointer(folder, groups)
    tensors: dict[str, Any] = {}

    def allocate(path: Path) -> dict[str, Any]:
        for name, stored in read_index(path).items():
            tensors[name] = torch.zeros(stored.shape, dtype=stored.dtype)
        return tensors

    assert saver.resume_into(allocate) is None
    assert tensors == {}
    save_step(saver, groups, 4)
    resumed = saver.resume_into(allocate)
    assert_is_step(tensors, groups, 4)
    return resumed.step if resumed else None
