"""Adapters on frozen weights: the same in every layout, and what a plain model gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ranks import run_ranks
from tests.training.lora_cases import LORA, SPLITS

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def alone(tokens):
    (found,) = run_ranks(1, "tests.training.lora_cases:trained", tokens, {(1, 1, 1): LORA})
    return found[1, 1, 1]


@pytest.mark.parametrize("world_size", SPLITS)
def test_every_layout_gives_the_losses_and_norms_of_one_process(tokens, world_size, alone):
    wanted = {
        layout: {name: replace(LORA[name], parallel=how) for name, how in cases.items()}
        for layout, cases in SPLITS[world_size].items()
    }
    ranks = run_ranks(world_size, "tests.training.lora_cases:trained", tokens, wanted)
    for layout, cases in wanted.items():
        for name in cases:
            expected = alone[name]
            for rank in ranks:
                found = rank[layout][name]
                assert found.losses == pytest.approx(expected.losses, rel=1e-9), (layout, name)
                assert found.norms == pytest.approx(expected.norms, rel=1e-9), (layout, name)
                assert found.frozen_bits_are_those_of_the_start
                assert found.only_adapters_have_gradients


def test_one_process_learns_clips_and_leaves_the_base_alone(alone):
    for name, run in alone.items():
        assert run.losses[-1] < run.losses[0], name
        assert max(run.norms) > 0.03, name
        assert run.frozen_bits_are_those_of_the_start
        assert run.only_adapters_have_gradients
