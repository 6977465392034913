"""Compressed sums of gradients: 16-bit formats, and PowerSGD against torch's."""

import pytest
import torch

from tests.ranks import run_ranks


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return run_ranks(request.param, "tests.parallel.compression_cases:together")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "epsilon"), [pytest.param("fp16", 2**-11), pytest.param("bf16", 2**-8)]
)
def test_a_16_bit_sum_is_rounded_and_the_same_on_all_ranks(ranks, name, epsilon):
    for rank in ranks:
        error, same, dtype = rank["halves"][name]
        assert same
        assert dtype is torch.float64
        # Each share is rounded once, and each of the (n - 1) additions; errors do not all add up.
        assert epsilon / 10 < error < len(ranks) * epsilon


@pytest.mark.ranks
def test_powersgd_gives_the_gradients_and_errors_of_torchs_hook(ranks):
    for rank in ranks:
        assert len(rank["torch"]) == 12
        assert max(rank["torch"]) < 1e-12


@pytest.mark.ranks
def test_gradients_of_the_rank_of_the_factors_are_summed_exactly(ranks):
    assert max(rank["low rank"] for rank in ranks) < 1e-12


@pytest.mark.ranks
def test_a_step_that_does_not_count_leaves_no_error_behind(ranks):
    assert all(rank["not kept"] == (True, False) for rank in ranks)


@pytest.mark.ranks
def test_the_first_steps_are_not_compressed(ranks):
    assert all(rank["start"] == [True, True, False, False] for rank in ranks)


@pytest.mark.ranks
def test_a_gradient_that_is_not_finite_reaches_all_ranks(ranks):
    assert all(rank["not finite"] for rank in ranks)
