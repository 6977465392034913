"""Two machines, and the way from the rendezvous into torch."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


@pytest.fixture
def machines():
    """Two network namespaces joined by a cable: each sees itself and the other, and no more."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    names = [f"meet{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        cable = [f"mt{os.getpid()}{side}" for side in "ab"]
        commands = [f"ip link add {cable[0]} type veth peer name {cable[1]}"]
        for number, name in enumerate(names):
            commands += [
                f"ip link set {cable[number]} netns {name}",
                f"ip -n {name} link set {cable[number]} name net0",
                f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev net0",
                f"ip -n {name} link set lo up",
                f"ip -n {name} link set net0 up",
            ]
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        remove_namespaces(names)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield [("ip", "netns", "exec", name) for name in names]
    remove_namespaces(names)


def remove_namespaces(names):
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_f16_two_machines_whose_own_names_are_loopback_meet_over_their_network(start, machines):
    # The machine's own name resolves to 127.0.0.1 in both (the "machines" share /etc/hosts); no
    # address is taken from a name.
    ranks = [start(rank, [2, 2], prefix=machines[rank // 2]) for rank in range(4)]
    meetings = [rank.wait_for("meeting")["meeting"] for rank in ranks]
    assert {meeting["address"] for meeting in meetings} == {"10.77.0.1"}
    assert {meeting["interface"] for meeting in meetings} == {"net0"}
    assert all(meeting["several_machines"] for meeting in meetings)
    assert "rank=3 host=n2 interface=net0 address=10.77.0.2 rank0=10.77.0.1" in ranks[3].logged()


def test_f16_loopback_is_refused_between_two_machines(start, machines):
    ranks = [start(r, [1, 1], prefix=machines[r], interface="lo") for r in range(2)]
    errors = {rank.wait_for("error")["error"] for rank in ranks}
    assert len(errors) == 1
    assert "lo is loopback and the ranks are on several machines" in errors.pop()


def test_f16_a_rank_0_without_a_network_is_told_so_through_the_folder(start, machines):
    subprocess.run([*machines[0], "ip", "link", "set", "net0", "down"], check=True)
    ranks = [start(r, [1, 1], prefix=machines[r]) for r in range(2)]
    for rank in ranks:
        text = rank.wait_for("error")["error"]
        assert "rank 0 on n1 has no interface but loopback" in text
        assert "rank 1 on n2" in text


def test_f62_a_rank_that_runs_but_cannot_reach_rank_0_says_why(start, machines):
    blackhole = "ip route add blackhole 10.77.0.1/32"
    subprocess.run([*machines[1], *blackhole.split()], check=True)
    ranks = [start(r, [1, 1], prefix=machines[r], timeout_s=14.0) for r in range(2)]
    text = ranks[0].wait_for("error")["error"]
    assert "rank 1 on n2" in text
    assert "runs, but rank 0 on n1 cannot be reached: 10.77.0.1 port" in text


@pytest.mark.ranks
def test_f16_torchs_store_and_gloo_work_between_two_machines(start, machines):
    ranks = [start(r, [1, 1], prefix=machines[r], store=True) for r in range(2)]
    assert [rank.wait_for("total")["total"] for rank in ranks] == [3.0, 3.0]


@pytest.mark.ranks
def test_torchs_store_takes_over_the_socket_that_rank_0_kept(start):
    ranks = [start(rank, [2], store=True) for rank in range(2)]
    assert [rank.wait_for("total")["total"] for rank in ranks] == [3.0, 3.0]
