"""Ranks as real processes that meet, or say who is missing."""

from __future__ import annotations

import resource
import socket
import stat

import pytest

from slurm_pt.errors import LaunchError
from slurm_pt.launch.environment import read_rank
from slurm_pt.launch.hello import make_hello
from slurm_pt.launch.rendezvous import RankLostError, meet
from slurm_pt.launch.wire import Channel, await_message
from tests.launch.meetings import read_when_there


def test_eight_ranks_meet_and_are_told_the_same(start, file):
    ranks = [start(rank, [4, 4]) for rank in range(8)]
    meetings = [rank.wait_for("meeting")["meeting"] for rank in ranks]
    assert [meeting["controls"] for meeting in meetings] == [7, 1, 1, 1, 1, 1, 1, 1]
    for meeting in meetings:
        del meeting["controls"]
        assert meeting == meetings[0]
    assert meetings[0]["hosts"] == ["n1"] * 4 + ["n2"] * 4
    assert meetings[0]["agreed"]["attempt"] == 3
    assert len(set(meetings[0]["agreed"]["pids"])) == 8


def test_ranks_on_one_host_use_loopback_whatever_their_nodes_are_called(start):
    # a development cluster: several Slurm nodes on one machine
    ranks = [start(rank, [1, 1]) for rank in range(2)]
    for rank in ranks:
        meeting = rank.wait_for("meeting")["meeting"]
        assert (meeting["address"], meeting["interface"]) == ("127.0.0.1", "lo")
        assert meeting["several_machines"] is False
    assert "interface=lo" in ranks[1].logged()


def test_the_file_with_the_nonce_is_for_its_owner_alone(start, file):
    start(0, [2])
    read_when_there(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_f62_a_late_rank_is_named_and_then_taken_in(start):
    ranks = [start(rank, [2, 2], report_s=0.3) for rank in (0, 1, 2)]
    line = ranks[0].wait_for("log", "1 of 4 ranks")["log"]
    assert "rank 3 on n2" in line
    late = start(3, [2, 2])
    for rank in (*ranks, late):
        assert rank.wait_for("meeting")


def test_f62_a_rank_that_never_comes_is_named_with_its_node_on_all_ranks(start):
    ranks = [start(rank, [2, 2], timeout_s=2.0) for rank in (0, 1, 2)]
    errors = [rank.wait_for("error") for rank in ranks]
    assert {error["kind"] for error in errors} == {"RankLostError"}
    assert len({error["error"] for error in errors}) == 1
    assert "1 of 4 ranks are missing" in errors[0]["error"]
    assert "rank 3 on n2" in errors[0]["error"]


def test_f62_a_missing_rank_0_is_named_by_the_others(start):
    error = start(3, [2, 2], timeout_s=0.5).wait_for("error")
    assert error["kind"] == "RankLostError"
    assert "waits for rank 0 on n1" in error["error"]
    assert "no rendezvous file yet" in error["error"]


def test_a_lost_rank_is_a_failure_and_not_the_users_mistake():
    assert (LaunchError.exit_code, RankLostError.exit_code) == (2, 1)


def test_a_single_rank_needs_no_socket_and_no_folder(tmp_path):
    info = read_rank({})
    meeting = meet(
        info,
        folder=tmp_path / "none",
        launch_key="k",
        hello=make_hello(info),
        timeout_s=1,
        interface=None,
        log=lambda _: None,
        stop_requested=lambda: False,
        agree=lambda hellos: {"ranks": len(hellos)},
    )
    assert (meeting.port, meeting.control, meeting.store_socket) == (0, {}, None)
    assert meeting.agreed == {"ranks": 1}
    assert meeting.take_store_fd() is None
    assert not (tmp_path / "none").exists()


def test_a_thousand_ranks_meet(start, file):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2300:
        pytest.skip(f"a thousand connections need 2300 open files, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2300), hard))
    host = start(0, [8] * 128)
    record = read_when_there(file)
    hello = make_hello(read_rank({})).as_json() | {"world_size": 1024}
    guests = []
    try:
        place = ("127.0.0.1", record["port"])
        guests += [Channel(socket.create_connection(place), record["nonce"]) for _ in range(1023)]
        for rank, guest in enumerate(guests, start=1):
            await_message(guest, guest.read_greeting, limit_s=20, check=lambda: None)
            guest.send({"kind": "hello", "hello": hello | {"rank": rank}})
        for guest in guests:
            kinds = [
                await_message(guest, guest.receive, limit_s=20, check=lambda: None)["kind"]
                for _ in range(2)
            ]
            assert kinds == ["welcome", "agreement"]
        assert host.wait_for("meeting")["meeting"]["controls"] == 1023
    finally:
        for guest in guests:
            guest.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
