import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def ends(tokens):
    return run_ranks(4, "tests.training.cases:stops", tokens, (2, 2, 1), 50, deadline_s=1800.0)


def test_a_flag_on_any_rank_ends_all_ranks_after_the_same_step(ends):
    # F25: fifty runs, a random rank each, sometimes two.
    assert all(rank == ends[0] for rank in ends)
    assert [end for _, end, _ in ends[0]] == [raised for raised, _, _ in ends[0]]
    assert {raised for raised, _, _ in ends[0]} == {1, 2, 3, 4, 5}


def test_a_stop_asked_for_in_the_last_step_is_an_ordinary_end(ends):
    assert all(stopped == (step < 5) for _, step, stopped in ends[0])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((1, 1, 1), id="one rank"),
        pytest.param((2, 2, 1), id="tp2 pp2"),
        pytest.param((1, 1, 4), id="dp4"),
    ],
)
def test_a_repeated_and_a_resumed_run_equal_the_first_bit_for_bit(tokens, layout):
    world_size = layout[0] * layout[1] * layout[2]
    for found in run_ranks(world_size, "tests.training.cases:resumes", tokens, layout):
        assert found == dict.fromkeys(found, True)
