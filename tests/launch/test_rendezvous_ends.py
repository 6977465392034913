"""Ranks that die or are asked to stop while others wait for them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.launch.meetings import pid_of


def test_f61_a_rank_that_is_killed_while_waiting_is_named(start, file):
    ranks = [start(rank, [2, 2], report_s=0.3) for rank in (0, 1, 2)]
    ranks[0].wait_for("log", "missing .*: rank 3 on n2")
    os.kill(pid_of(ranks[2]), signal.SIGKILL)
    for rank in ranks[:2]:
        error = rank.wait_for("error")
        assert error["kind"] == "RankLostError"
        assert "rank 2 on n2" in error["error"]


def test_f61_a_rank_0_that_is_killed_while_waiting_is_named(start):
    ranks = [start(rank, [1, 1, 1], report_s=0.3) for rank in (0, 1)]
    ranks[0].wait_for("log", "missing .*: rank 2 on n3")
    os.kill(pid_of(ranks[0]), signal.SIGKILL)
    error = ranks[1].wait_for("error")
    assert error["kind"] == "RankLostError"
    assert "rank 0 on n1 left" in error["error"]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_asked_to_stop_takes_all_with_it_at_once(start, stopped):
    ranks = [start(rank, [3], report_s=0.3) for rank in (0, 1)]
    ranks[0].wait_for("log", "missing .*: rank 2 on n1")
    asked = time.monotonic()
    os.kill(pid_of(ranks[stopped]), signal.SIGTERM)
    for rank in ranks:
        error = rank.wait_for("error")
        assert error["kind"] == "MeetingStoppedError"
        assert f"rank {stopped} was asked to stop" in error["error"]
    assert time.monotonic() - asked < 5


def test_a_rank_without_rank_0_stops_when_asked(start):
    guest = start(1, [2], report_s=0.3)
    guest.wait_for("log")
    os.kill(pid_of(guest), signal.SIGTERM)
    assert guest.wait_for("error")["kind"] == "MeetingStoppedError"
