"""The state of a loop of one's own."""

import pytest

from tests.ranks import run_ranks


@pytest.mark.ranks
def test_a_loop_of_ones_own_goes_on_bit_for_bit_in_the_memory_it_has(tmp_path):
    """A module with dropout, AdamW and a schedule, on two ranks with masks of their own."""
    for found in run_ranks(2, "tests.checkpoint.own_loop_cases:own_loop_goes_on", tmp_path):
        assert found == dict.fromkeys(found, True)
