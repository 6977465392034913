"""What is no rank of this start does no harm: strangers, and files of earlier starts."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

from slurm_pt.launch.environment import read_rank
from slurm_pt.launch.hello import make_hello
from slurm_pt.launch.wire import Channel, await_message
from tests.launch.meetings import read_when_there


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
