"""Ports and sockets: which are free, which are listened on, who greets."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from slurm_pt.errors import DevClusterError

# Below Linux's range for outgoing connections (32768 and up), so that no chance connection
# takes a port between our look and the daemon's bind.
_LOWEST, _HIGHEST = 20_000, 32_000
_LISTEN = "0A"


def find_free_ports(count: int) -> tuple[int, ...]:
    """`count` TCP ports that nothing listens on, on any address."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.sample(range(_LOWEST, _HIGHEST), k=min(_HIGHEST - _LOWEST, 20 * count)):
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                listener.bind(("", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return tuple(found)
    raise DevClusterError(
        f"{count} free ports between {_LOWEST} and {_HIGHEST} were asked for, and {len(found)} "
        f"found. To fix: `slurm-pt devcluster down` for other clusters, or fewer nodes."
    )


def is_listening(port: int) -> bool:
    """Whether some process of this machine listens on TCP `port`.

    Read from the kernel's table: a trial connection would fill the daemon's log with errors.
    """
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            rows = table.read_text().splitlines()[1:]
        except OSError:  # no IPv6
            continue
        for row in rows:
            _, local, _, state = row.split(maxsplit=4)[:4]
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def is_greeted_at(path: Path) -> bool:
    """Whether a database server greets whoever connects to its Unix socket.

    The socket alone says little: MariaDB 11.8 makes it seconds before it answers on a busy machine.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            return connection.recv(1) != b""
        except OSError:
            return False
