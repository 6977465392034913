"""Adapters and shared layers: every layout gives what one process gives, wherever it goes on."""

from __future__ import annotations

import pytest

from slurm_pt.checkpoint.tensor_index import read_index
from tests.ranks import run_ranks
from tests.training.lora_cases import CASES, SPLITS

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def alone(tokens):
    wanted = {(1, 1, 1): list(CASES.items())}
    (found,) = run_ranks(1, "tests.training.lora_cases:trained", tokens, wanted)
    return dict(zip(CASES, found, strict=True))


@pytest.fixture(scope="module")
def split(tokens):
    """By (world size, place in its list): the case's name, and what each rank saw."""
    found = {}
    for world_size, wanted in SPLITS.items():
        ranks = run_ranks(world_size, "tests.training.lora_cases:trained", tokens, wanted)
        names = [name for cases in wanted.values() for name, _ in cases]
        for place, name in enumerate(names):
            found[world_size, place] = name, [rank[place] for rank in ranks]
    return found


def test_every_layout_gives_the_losses_and_norms_of_one_process(split, alone):
    for place, (name, ranks) in split.items():
        for rank in ranks:
            assert rank.losses == pytest.approx(alone[name].losses, rel=1e-9), (name, place)
            assert rank.norms == pytest.approx(alone[name].norms, rel=1e-9), (name, place)


def test_frozen_weights_keep_their_bits_and_cost_no_gradient_and_no_moments(split, alone):
    for ranks in [ranks for _, ranks in split.values()] + [[run] for run in alone.values()]:
        assert all(rank.frozen_bits_are_those_of_the_start for rank in ranks)
        assert all(rank.what_is_frozen_has_no_gradient_and_no_moments for rank in ranks)


def test_one_process_learns_and_clips(alone):
    for name, run in alone.items():
        assert run.losses[-1] < run.losses[0], name
        assert max(run.norms) > 0.03, name  # SHORT.grad_clip


def test_adapters_send_what_the_formulas_say_and_nothing_of_hidden_size_on_top(split):
    ranks_of = {name: ranks for (size, _), (name, ranks) in split.items() if size == 4}
    for name, ranks in ranks_of.items():
        for rank in ranks:
            for purpose, size in rank.planned.items():
                assert rank.sent.get(purpose, 0.0) == pytest.approx(size, rel=1e-12), (
                    name,
                    purpose,
                )
    by_all_weights, by_adapters = (
        ranks_of[name][0].sent["tensor"] for name in ("llama, all weights", "llama")
    )
    assert by_adapters < 0.9 * by_all_weights


def test_a_checkpoint_of_adapters_goes_on_in_any_layout(tokens, tmp_path):
    moves = "tests.training.lora_cases:moves"
    (whole, *_) = run_ranks(8, moves, tokens, tmp_path, [(2, 2, 2)], 2)
    stored = read_index(tmp_path / "step_00000002")
    assert {name.rpartition(".")[2] for name in stored} == {"lora_a", "lora_b"}
    for world_size, layouts in ((1, [(1, 1, 1)]), (4, [(1, 4, 1)])):
        (found, *_) = run_ranks(world_size, moves, tokens, tmp_path, layouts)
        for losses in found:
            assert losses == pytest.approx(whole[0][2:], rel=1e-9)
