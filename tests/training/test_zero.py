"""ZeRO stage 1: every layout trains the same model as one process, and its checkpoints move."""

from __future__ import annotations

import pytest
import torch

from slurm_pt.checkpoint.tensor_bytes import BoxReader
from slurm_pt.checkpoint.tensor_index import read_index
from tests.ranks import run_ranks
from tests.training.moving import SAVED_AT
from tests.training.zero_cases import CASES, SHORT

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def alone(tokens):
    (found,) = run_ranks(1, "tests.training.zero_cases:alone", tokens)
    return found


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_layout_gives_the_curve_of_one_process_and_holds_its_share(tokens, alone, world_size):
    names = [name for name, case in CASES.items() if prod(case.layout) == world_size]
    ranks = run_ranks(world_size, "tests.training.zero_cases:sharded", tokens, names)
    for name in names:
        losses, norms = alone[CASES[name].model]
        for rank in ranks:
            (own_losses, own_norms), (held, planned) = rank[name]
            assert own_losses == pytest.approx(losses, rel=1e-9), name
            assert own_norms == pytest.approx(norms, rel=1e-9), name
            assert held == planned, name


def prod(layout):
    tp, pp, dp = layout
    return tp * pp * dp


def test_the_runs_that_are_compared_clip(alone):
    for losses, norms in alone.values():
        assert losses[-1] < losses[0]
        assert max(norms) > SHORT.grad_clip


def test_checkpoints_move_between_layouts_bit_for_bit(tokens, tmp_path):
    first, *_ = kept = ["tp2 dp2, ZeRO", "dp4, ZeRO", "pp2 dp2, interleaved, ZeRO"]
    for found in run_ranks(4, "tests.training.moving:kept", tmp_path / "kept", tokens, kept):
        assert found == dict.fromkeys(kept, True)
    # From each to the next: replicas become more and fewer, ZeRO is switched off and on.
    journey = [
        (1, ["one process"]),
        (2, ["dp2, ZeRO", "tp2"]),
        (4, ["dp4, ZeRO", "dp4", "pp2 dp2, interleaved, ZeRO"]),
    ]
    source = tmp_path / "kept" / first
    for world_size, names in journey:
        run_ranks(world_size, "tests.training.moving:pass_on", source, tmp_path, tokens, names)
        source = tmp_path / names[-1]
    expected = tensors(tmp_path / "kept" / first)
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in expected)
    for _, names in journey:
        for name in names:
            found = tensors(tmp_path / name)
            assert found.keys() == expected.keys()
            different = [key for key in expected if not torch.equal(found[key], expected[key])]
            assert not different, name


def tensors(folder):
    path = folder / f"step_{SAVED_AT:08d}"
    reader = BoxReader(path)
    return {name: reader.read(stored) for name, stored in read_index(path).items()}


def test_an_overflow_on_one_rank_is_agreed_on_and_leaves_the_weights(tokens):
    ranks = run_ranks(4, "tests.training.precision_cases:overflow", tokens, (1, 1, 4), 1)
    for skipped, scales, weights, _ in ranks:
        assert (skipped, scales, weights) == ranks[0][:3]
        assert skipped == [None, None, True, None, None, None, None]
        assert scales[3] == scales[2] / 2
        assert weights[2] == weights[1]
        assert weights[3] != weights[2]
