"""The parallel parts on gloo processes, compared with the same thing on one."""

from datetime import timedelta

import pytest

from tests.ranks import RankFailedError, run_ranks

pytestmark = pytest.mark.ranks


def test_groups_hold_the_ranks_of_the_layout_and_can_be_made_again_after_close():
    # Rank order tp, dp, pp. tp2 pp2 dp2: rank 5 = tp 1, dp 0, pp 1. tp1 pp4 dp2: rank 5 is
    # tp 0, dp 1, pp 2, a middle stage.
    results = run_ranks(8, "tests.parallel.cases:memberships", [(2, 2, 2), (1, 4, 2)])
    first, second = results[5]
    everyone = list(range(8))
    assert first["tp"] == [4, 5]
    assert first["dp"] == [5, 7]
    assert first["pp"] == first["pp_backward"] == first["embedding"] == [1, 5]
    assert first["world"] == first["background"] == everyone
    assert second["tp"] == [5]
    assert second["dp"] == [4, 5]
    assert second["pp"] == [1, 3, 5, 7]
    assert second["embedding"] is None
    assert results[7][1]["embedding"] == [1, 7]
    for rank in everyone:
        assert [row["agreed"] for row in results[rank]] == [[True, True, False]] * 2
        assert all(row["background is its own"] for row in results[rank])
        minute = timedelta(minutes=1)  # as was asked for
        assert all(set(row["timeouts"].values()) == {minute} for row in results[rank])
        # But in the background ranks wait for one that reads and hashes.
        assert all(row["background timeout"] >= timedelta(hours=1) for row in results[rank])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_split_layers_and_loss_equal_whole_ones(tp, sequence):
    for worst in run_ranks(tp, "tests.parallel.cases:layers_match", sequence):
        assert worst == pytest.approx(dict.fromkeys(worst, 0.0), abs=1e-13)


def test_the_split_loss_survives_logits_beyond_the_range_of_exp():
    assert run_ranks(4, "tests.parallel.cases:extreme_logits") == [[True, True]] * 4


def test_a_stage_does_not_keep_the_outputs_it_has_sent():
    first, *_ = run_ranks(3, "tests.parallel.cases:outputs_alive", 6)
    assert first == [0] * 6


def test_gradients_are_summed_in_buckets():
    # Ranks hold n * 10 + (0, 1, 2, 3), so the sum is n * 40 + 6; five in pairs: 3 buckets.
    for found in run_ranks(4, "tests.parallel.cases:sums"):
        assert found["values"] == [[6.0], [46.0], [86.0], [126.0], [166.0]]
        assert found["zeros"] == [0.0] * 5
        assert found["buckets"] == 3


def test_with_zero_each_replica_sums_its_part_and_all_get_what_it_made_of_it():
    # The fifth and fourth share a buffer of 12; each other of 6 is filled up to 8, in parts of 2.
    owned = [[2, 2, 2, 0, 3], [2, 2, 2, 0, 3], [2, 2, 2, 3, 0], [0, 0, 0, 3, 0]]
    for rank, found in enumerate(run_ranks(4, "tests.parallel.cases:sharded_sums")):
        assert found["moved"] == [[float(number)] for number in range(5)]
        assert found["all moved"]
        assert found["buffers"] == [12, 8, 8, 8]
        assert found["owned"] == owned[rank]
        for number, total in enumerate(found["sums"]):
            assert total == ([number * 40.0 + 6.0] if owned[rank][number] else [])
        for number in range(3):
            owners = [0, 0, 1, 1, 2, 2]
            assert found["gathered"][number] == [number + 100.0 * owner for owner in owners]
        assert found["gathered"][3] == [203.0] * 3 + [303.0] * 3
        assert found["gathered"][4] == [4.0] * 3 + [104.0] * 3


def test_the_norm_counts_each_number_once():
    # Two stages: 2 * 4 split numbers; the whole parameter of 3, listed as a copy on the first
    # stage, counts on the last one only; the tied copy never: 8 + 3.
    totals = run_ranks(8, "tests.parallel.cases:norm_of_ones")
    assert totals == pytest.approx([11.0] * 8, rel=1e-14)


def test_the_failing_rank_is_named_and_its_peers_are_killed():
    with pytest.raises(RankFailedError, match=r"(?s)rank [01]:.*needs 8 ranks, not 2"):
        run_ranks(2, "tests.parallel.cases:memberships", [(2, 2, 2)])
