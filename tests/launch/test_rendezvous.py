"""Ranks as real processes that meet, or say why they cannot."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurm_pt.errors import LaunchError
from slurm_pt.launch.environment import Launcher, RankInfo, read_rank
from slurm_pt.launch.hello import make_hello
from slurm_pt.launch.rendezvous import RankLostError, launch_key, meet
from slurm_pt.launch.wire import Channel, await_message

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 180.0


class Rank:
    """One rank's process and what it has printed."""

    def __init__(self, spec, prefix=()):
        self.rank = spec["rank"]
        self.records = []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.launch.meeting_process", json.dumps(spec)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, key, pattern=""):
        """The next record with this key, and with text that matches."""
        for line in self.process.stdout:
            self.records.append(json.loads(line))
            if key in self.records[-1] and re.search(pattern, str(self.records[-1][key])):
                return self.records[-1]
        raise AssertionError(f"rank {self.rank} ended without {key!r}: {self.records}")

    def logged(self):
        return "\n".join(record["log"] for record in self.records if "log" in record)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path):
    """Starts ranks of one meeting; all are gone after the test, and none outlives DEADLINE_S."""
    ranks = []

    def start_rank(rank, counts, *, prefix=(), **options):
        spec = {"rank": rank, "counts": counts, "folder": str(tmp_path / "attempt"), **options}
        ranks.append(Rank(spec, ("timeout", "-s", "KILL", str(DEADLINE_S), *prefix)))
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.end()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "attempt" / "rendezvous-k.json"


def read_when_there(file):
    """The rendezvous file, once rank 0 has written it."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if file.exists():
            return json.loads(file.read_text())
        time.sleep(0.01)
    raise AssertionError(f"{file} was never written")


def start_last(start, early, last):
    """Starts ranks from (rank, counts, options); the last one when the others wait already.

    Rank 0 stays five seconds after a refusal: on a busy machine a rank may take longer to begin.
    """
    ranks = [start(rank, counts, **options) for rank, counts, options in early]
    for rank in ranks:
        rank.wait_for("begun")
    rank, counts, options = last
    return [*ranks, start(rank, counts, **options)]


def pid_of(rank):
    """The rank's own process: `timeout` stands before it."""
    children = Path(f"/proc/{rank.process.pid}/task/{rank.process.pid}/children").read_text()
    return int(children.split()[0])


# -------------------------------------------------------------------------------- meetings


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


# ----------------------------------------------------------------------------- duplicates


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


# --------------------------------------------------------------------------- comparing


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


# ----------------------------------------------------------------------------- strangers


def test_strangers_at_the_port_are_dropped_counted_and_harm_nobody(start, file):
    host = start(0, [3], report_s=0.3)
    record = read_when_there(file)
    place = ("127.0.0.1", record["port"])
    silent = socket.create_connection(place)
    with socket.create_connection(place) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"challenge" in web.recv(1000)
        host.wait_for("log", "1 because it does not know the nonce")
    with (
        socket.create_connection(place) as flood,
        pytest.raises(OSError, match=r"Broken|reset"),
    ):
        flood.sendall(b"x" * 100_000_000)
    with socket.create_connection(place):
        pass
    wrong = Channel(socket.create_connection(place), "a wrong nonce")
    await_message(wrong, wrong.read_greeting, limit_s=10, check=lambda: None)
    wrong.send({"kind": "hello", "hello": {"rank": 1}})
    host.wait_for("log", "2 because it does not know the nonce")
    assert "they left without a word" in host.logged()
    assert "it sends without end" in host.logged()
    others = [start(rank, [3]) for rank in (1, 2)]
    for rank in (host, *others):
        assert rank.wait_for("meeting")
    wrong.close()
    silent.close()


def answer_wrongly(stranger, answered):
    """Greets everybody who connects, as rank 0 does, and answers a Hello without the nonce."""
    while not answered.is_set():
        with contextlib.suppress(OSError), stranger.accept()[0] as connection:
            connection.sendall(b'{"challenge": "c"}\n')
            connection.recv(100_000)
            connection.sendall(b"00 {}\n")


def test_a_rank_does_not_believe_a_stranger_that_listens_where_rank_0_was(start, file):
    # a stale file whose port now belongs to another service, which even greets
    answered = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.1)
        left_over(file, state="waiting", port=stranger.getsockname()[1])
        thread = threading.Thread(target=answer_wrongly, args=(stranger, answered))
        thread.start()
        try:
            guest = start(1, [2], report_s=0.3)
            guest.wait_for("log", "does not know the nonce")
        finally:
            answered.set()
            thread.join()
    start(0, [2])
    assert guest.wait_for("meeting")


def left_over(file, **changes):
    """A rendezvous file as an earlier start of the same name left it."""
    file.parent.mkdir(exist_ok=True)
    record = {
        "state": "complete",
        "text": "all 2 ranks were there",
        "time": time.time() - 3600,
        "nonce": "old",
        "addresses": ["127.0.0.1"],
        "port": 1,
        "host": "n1",
        "machine": make_hello(read_rank({})).machine,
        "pid": 4194304,
        "process_mark": "1",
        "world_size": 2,
    }
    file.write_text(json.dumps(record | changes))


@pytest.mark.parametrize("state", ["waiting", "complete", "refused", "lost", "stopped"])
def test_a_file_of_an_earlier_start_is_seen_through(start, file, state):
    left_over(file, state=state)
    guest = start(1, [2], report_s=0.3)
    guest.wait_for("log", "cannot be reached" if state == "waiting" else "a start that ended")
    host = start(0, [2])
    assert guest.wait_for("meeting")
    assert host.wait_for("meeting")


def test_a_damaged_file_is_no_end(start, file):
    file.parent.mkdir()
    file.write_text("{")
    guest = start(1, [2], report_s=0.3)
    guest.wait_for("log", "cannot be read")
    host = start(0, [2])
    assert guest.wait_for("meeting")
    assert host.wait_for("meeting")


# ------------------------------------------------------------------------ deaths and stops


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


# ------------------------------------------------------------------------------- many ranks


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


# ---------------------------------------------------------------------------- two machines


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


# ------------------------------------------------------------------------------- the key


def info_of(launcher, **changes):
    return RankInfo(0, 2, 0, 2, 0, 1, launcher, **changes)


@pytest.mark.parametrize(
    ("info", "environ", "key"),
    [
        (
            info_of(Launcher.slurm, job_id="7", step_id="3", restart_count=1),
            {},
            "job7-step3-start1",
        ),
        (
            info_of(Launcher.torchrun),
            {
                "TORCHELASTIC_RUN_ID": "r",
                "TORCHELASTIC_RESTART_COUNT": "2",
                "MASTER_PORT": "29500",
            },
            "torchrun-r-2-29500",
        ),
        (
            info_of(Launcher.torchrun, job_id="7"),
            {"TORCHELASTIC_RUN_ID": "r"},
            "torchrun-r-job7-stepnone-start0",
        ),
        (info_of(Launcher.explicit), {"SLURM_PT_LAUNCH_KEY": "local-1a"}, "local-1a"),
        (info_of(Launcher.mpi), {"PMIX_NAMESPACE": "prterun-1"}, "prterun-1"),
        (info_of(Launcher.mpi, job_id="7"), {}, "job7-stepnone-start0"),
    ],
)
def test_f11_the_launch_key_names_one_start(info, environ, key):
    assert launch_key(info, environ) == key


def test_a_launch_key_is_fit_for_a_file_name():
    info = info_of(Launcher.explicit)
    one, other = (launch_key(info, {"SLURM_PT_LAUNCH_KEY": text}) for text in ("../a b", "../a/b"))
    assert one.startswith(".._a_b-")
    assert one != other
    assert len(launch_key(info, {"SLURM_PT_LAUNCH_KEY": "x" * 300})) < 120


def test_a_start_without_a_name_is_refused():
    with pytest.raises(LaunchError, match="SLURM_PT_LAUNCH_KEY"):
        launch_key(info_of(Launcher.explicit), {})
