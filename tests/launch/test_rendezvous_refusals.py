"""Ranks that do not fit together end the start on all of them, with the reason."""

from __future__ import annotations

import json

import pytest

from tests.launch.meetings import read_when_there, start_last


def test_f13_f65_two_processes_that_claim_one_rank_end_the_start_at_once(start):
    ranks = start_last(start, [(0, [3], {}), (1, [3], {})], (1, [3], {}))
    errors = [rank.wait_for("error") for rank in ranks]
    assert {error["kind"] for error in errors} == {"LaunchError"}
    text = errors[0]["error"]
    assert {error["error"] for error in errors} == {text}
    assert "two processes claim rank 1" in text


def test_f13_f65_a_second_rank_0_is_refused_and_the_first_goes_on(start, file):
    first = start(0, [2])
    read_when_there(file)
    error = start(0, [2]).wait_for("error")
    assert "two processes claim rank 0" in error["error"]
    start(1, [2])
    assert first.wait_for("meeting")


def test_f65_a_process_too_many_is_refused_after_the_meeting(start):
    ranks = [start(rank, [2]) for rank in range(2)]
    for rank in ranks:
        rank.wait_for("meeting")
    assert "one too many" in start(1, [2]).wait_for("error")["error"]
    assert "two processes claim rank 0" in start(0, [2]).wait_for("error")["error"]


def test_f65_a_rank_0_whose_file_was_replaced_by_another_notices(start, file):
    first = start(0, [2])
    record = read_when_there(file)
    file.write_text(json.dumps(record | {"nonce": "other", "pid": 1, "host": "n9"}))
    assert "process 1 on n9" in first.wait_for("error")["error"]


@pytest.mark.parametrize(
    ("hello", "shown"),
    [
        ({"versions": {"python": "3.11.7", "torch": "9.9"}}, ["version of", "9.9"]),
        ({"code_digest": "abc"}, ["program's code", "abc"]),
        ({"config_signature": "f00"}, ["configuration's signature", "f00"]),
        ({"world_size": 4}, ["world size", "3 on rank 0", "4 on rank 2"]),
        ({"problem": "GLOO_SOCKET_IFNAME=^lo is wrong here"}, ["rank 2 on n2", "^lo"]),
    ],
)
def test_f13_a_rank_that_differs_ends_the_start_on_all_with_both_values(start, hello, shown):
    first = {"versions": {"python": "3.11.7", "torch": "2.13"}} if "versions" in hello else {}
    early = [(rank, [2, 1], {"hello": first}) for rank in range(2)]
    ranks = start_last(start, early, (2, [2, 1], {"hello": hello}))
    errors = [rank.wait_for("error") for rank in ranks]
    assert {error["kind"] for error in errors} == {"LaunchError"}
    assert len({error["error"] for error in errors}) == 1
    for part in shown:
        assert part in errors[0]["error"]
    assert "rank 2 on n2" in errors[0]["error"]


def test_f14_two_ranks_with_one_gpu_are_refused_whatever_their_nodes_are_called(start):
    devices = ["GPU-a", "GPU-b", "GPU-b"]
    *early, last = [(r, [2, 1], {"hello": {"devices": [name]}}) for r, name in enumerate(devices)]
    ranks = start_last(start, early, last)
    errors = {rank.wait_for("error")["error"] for rank in ranks}
    assert len(errors) == 1
    assert "use the same GPU GPU-b" in errors.pop()


def test_f17_an_interface_that_one_node_does_not_have_ends_the_start_on_all(start):
    ranks = [start(0, [1, 1]), start(1, [1, 1], interface="eno99")]
    errors = {rank.wait_for("error")["error"] for rank in ranks}
    assert len(errors) == 1
    text = errors.pop()
    assert "rank 1 on n2" in text
    assert "no interface 'eno99' is up here" in text
    assert "lo (127.0.0.1" in text


def test_what_rank_0_found_wrong_by_itself_is_told_to_all(start):
    ranks = start_last(start, [(1, [2], {})], (0, [2], {"hello": {"problem": "no disk"}}))
    assert all("no disk" in rank.wait_for("error")["error"] for rank in ranks)
