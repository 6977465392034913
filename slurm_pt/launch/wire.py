"""Connections between ranks that prove who they are: JSON lines under a secret nonce.

The side that accepts greets with a challenge. Each line after that carries an HMAC over the
reader's challenge and the line itself, keyed by the nonce in the rendezvous file, which only the
job's user can read. A port scanner, a stray HTTP client or a rank of another start proves nothing
and is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

MOST_UNPROVEN_BYTES = 1 << 16
"""A rank's Hello is a few kB; a connection that sends more without proof is dropped."""

_MOST_BYTES = 1 << 26
_SLICE_S = 0.1
"""How long a wait goes on without looking at the clock and the wish to stop."""


class ConnectionEndedError(Exception):
    """The other side closed the connection, or it broke."""


class UnprovenError(Exception):
    """The other side does not know the nonce."""


class Channel:
    """One connection; never blocks. `peer` is for its owner to use."""

    def __init__(self, connection: socket.socket, nonce: str):
        connection.setblocking(False)
        _keep_alive(connection)
        self.connection = connection
        self.peer: int | None = None
        self.born = time.monotonic()
        self.is_proven = False
        self._nonce = nonce.encode()
        self._own_challenge = secrets.token_hex(16)
        self._other_challenge: str | None = None
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    def greet(self) -> None:
        """Sends the challenge that the other side's lines must answer."""
        self._unsent += json.dumps({"slurm_pt": 1, "challenge": self._own_challenge}).encode()
        self._unsent += b"\n"
        self.flush()

    def read_greeting(self) -> bool:
        """Whether the other side has greeted. Raises UnprovenError if it says something else."""
        line = self._next_line()
        if line is None:
            return False
        try:
            self._other_challenge = str(json.loads(line)["challenge"])
        except (ValueError, KeyError, TypeError) as error:
            raise UnprovenError("it does not speak our protocol") from error
        return True

    def send(self, message: Message) -> None:
        """Queues a line and sends what can be sent now."""
        if self._other_challenge is None:
            raise UnprovenError("nothing may be told before the other side has spoken")
        body = json.dumps({**message, "challenge": self._own_challenge}).encode()
        self._unsent += self._proof(self._other_challenge, body) + b" " + body + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Sends what can be sent; whether all is out."""
        while self._unsent:
            try:
                sent = self.connection.send(self._unsent)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ConnectionEndedError(str(error)) from error
            del self._unsent[:sent]
        return True

    def receive(self) -> Message | None:
        """The next proven line, if a whole one is there."""
        line = self._next_line()
        if line is None:
            return None
        proof, _, body = line.partition(b" ")
        if not hmac.compare_digest(proof, self._proof(self._own_challenge, body)):
            raise UnprovenError("it does not know the nonce of this start")
        try:
            message: Message = json.loads(body)
            self._other_challenge = str(message.pop("challenge"))
        except (ValueError, KeyError, AttributeError) as error:
            raise UnprovenError("it does not speak our protocol") from error
        self.is_proven = True
        return message

    def close(self) -> None:
        self.connection.close()

    def _proof(self, challenge: str, body: bytes) -> bytes:
        return hmac.digest(self._nonce, challenge.encode() + body, "sha256").hex().encode()

    def _next_line(self) -> bytes | None:
        """Reads what is there; a whole line without its end."""
        while b"\n" not in self._received:
            limit = _MOST_BYTES if self.is_proven else MOST_UNPROVEN_BYTES
            if len(self._received) > limit:
                raise UnprovenError("it sends without end")
            try:
                data = self.connection.recv(1 << 16)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ConnectionEndedError(str(error)) from error
            if not data:
                raise ConnectionEndedError("closed by the other side")
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return line


def listen() -> socket.socket:
    """A listening socket on a free port of all addresses, of IPv4 and IPv6 where there is both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 can be switched off in the kernel all the same
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=4096)


def connect(
    address: str, port: int, *, limit_s: float, check: Callable[[], None]
) -> socket.socket | str:
    """A connection, or in words why there is none. `check` may raise to leave early."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        error = connection.connect_ex((address, port))
        deadline = time.monotonic() + limit_s
        while not _wait(connection, select.POLLOUT, _SLICE_S):
            check()
            if time.monotonic() > deadline:
                connection.close()
                return f"no answer within {limit_s:g} s"
        pending = {errno.EINPROGRESS, errno.EWOULDBLOCK, 0}
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or (
            0 if error in pending else error
        )
    except OSError as problem:
        connection.close()
        return str(problem)
    except BaseException:
        connection.close()
        raise
    if error:
        connection.close()
        return os.strerror(error)
    return connection


def await_message(
    channel: Channel,
    read: Callable[[], Message | bool | None],
    *,
    limit_s: float,
    check: Callable[[], None],
) -> Message | bool | None:
    """What `read` finds, waiting for at most `limit_s`; None after that."""
    deadline = time.monotonic() + limit_s
    while True:
        found = read()
        if found:
            return found
        check()
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        _wait(channel.connection, select.POLLIN, min(_SLICE_S, left))


def source_address(address: str) -> str | None:
    """The own address that packets to `address` would carry; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _wait(connection: socket.socket, event: int, limit_s: float) -> bool:
    """Whether something happens on a connection in time. Not select: it ends at fd 1023."""
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(limit_s * 1000))


def _keep_alive(connection: socket.socket) -> None:
    """Lets the kernel notice a dead machine in about half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
