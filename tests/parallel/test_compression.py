"""Compressed sums of gradients: 16-bit formats, and PowerSGD against torch's."""

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(4, "tests.parallel.compression_cases:on_four")


@pytest.fixture(params=[2, 4], ids=["dp2", "dp4"])
def dp(request):
    return request.param


@pytest.mark.parametrize(
    ("name", "epsilon"), [pytest.param("fp16", 2**-11), pytest.param("bf16", 2**-8)]
)
def test_a_16_bit_sum_is_rounded_and_the_same_on_all_ranks(four_ranks, dp, name, epsilon):
    for rank in four_ranks:
        error, same, dtype = rank[dp]["halves"][name]
        assert same
        assert dtype is torch.float64
        # Each share is rounded once, and each of the (n - 1) additions; errors do not all add up.
        assert epsilon / 10 < error < dp * epsilon


def test_powersgd_gives_the_gradients_and_errors_of_torchs_hook(four_ranks, dp):
    for rank in four_ranks:
        assert len(rank[dp]["torch"]) == 12
        assert max(rank[dp]["torch"]) < 1e-12


def test_gradients_of_the_rank_of_the_factors_are_summed_exactly(four_ranks, dp):
    assert max(rank[dp]["low rank"] for rank in four_ranks) < 1e-12


def test_a_step_that_does_not_count_leaves_no_error_behind(four_ranks, dp):
    assert all(rank[dp]["not kept"] == (True, False) for rank in four_ranks)


def test_the_first_steps_are_not_compressed(four_ranks, dp):
    assert all(rank[dp]["start"] == [True, True, False, False] for rank in four_ranks)


def test_a_gradient_that_is_not_finite_reaches_all_ranks(four_ranks, dp):
    assert all(rank[dp]["not finite"] for rank in four_ranks)
