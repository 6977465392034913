"""What a meeting is: the terms it is held under, how it can end, and what it leaves."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_pt.errors import LaunchError
from slurm_pt.launch.environment import RankInfo
from slurm_pt.launch.hello import Hello

Agree = Callable[[tuple[Hello, ...]], Mapping[str, Any]]
"""Called on rank 0 with everybody's Hello, in rank order; what it returns is told to all."""


class RankLostError(LaunchError):
    """A rank did not come, or died while the others waited: a failure, not the user's mistake."""

    exit_code = 1


class MeetingStoppedError(Exception):
    """A rank was asked to stop before all were there; nothing has begun. Exit with 75."""


@dataclass
class Meeting:
    """What the ranks of one start know of each other, and the connections that stay open."""

    address: str
    """Where this rank reaches rank 0."""
    port: int
    """Port of rank 0's socket for torch's store; 0 for a single rank."""
    interface: str
    """This rank's interface, for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."""
    several_machines: bool
    """Whether some rank came from another machine than rank 0's."""
    hellos: tuple[Hello, ...]
    """On rank 0 all ranks', elsewhere this rank's own."""
    hosts: tuple[str, ...]
    """Node names by rank."""
    agreed: dict[str, Any]
    """What rank 0 decided (`agree`)."""
    control: dict[int, socket.socket] = field(default_factory=dict)
    """Open connections by the other side's rank: all on rank 0, one elsewhere. Nothing is sent on
    them now; one that ends means that the rank is gone."""
    store_socket: socket.socket | None = None
    """Rank 0's listening socket of `port`."""

    def take_store_fd(self) -> int | None:
        """The file descriptor for TCPStore's master_listen_fd, which closes it; None elsewhere."""
        if self.store_socket is None:
            return None
        descriptor, self.store_socket = self.store_socket.detach(), None
        return descriptor

    def close(self) -> None:
        for connection in self.control.values():
            connection.close()
        self.control.clear()
        if self.store_socket is not None:
            self.store_socket.close()
            self.store_socket = None


@dataclass(frozen=True)
class Terms:
    """What one meeting is held under; for `host` and `guest`."""

    info: RankInfo
    folder: Path
    launch_key: str
    timeout_s: float
    report_s: float
    interface: str | None
    log: Callable[[str], None]
    stop_requested: Callable[[], bool]
    started: float = field(default_factory=time.time)
    """Unix seconds; compared with what other ranks write into files."""
    started_mono: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        return self.started_mono + self.timeout_s

    @property
    def file(self) -> Path:
        return self.folder / f"rendezvous-{self.launch_key}.json"

    def note_file(self, rank: int) -> Path:
        """Where a rank that cannot reach rank 0 says so."""
        return self.folder / f"rendezvous-{self.launch_key}-note-{rank}.json"

    def check(self) -> None:
        """Leaves at once when this rank is asked to stop."""
        if self.stop_requested():
            raise MeetingStoppedError(
                f"rank {self.info.rank} was asked to stop before all ranks had come together"
            )


def error_of(kind: str, text: str) -> Exception:
    """What a rank raises when rank 0 ends the meeting with this kind of farewell."""
    if kind == "stopped":
        return MeetingStoppedError(text)
    return RankLostError(text) if kind == "lost" else LaunchError(text)


def kind_of(error: BaseException) -> str:
    """The other way round."""
    if isinstance(error, MeetingStoppedError):
        return "stopped"
    if isinstance(error, LaunchError) and not isinstance(error, RankLostError):
        return "refused"
    return "lost"


def process_mark(pid: int) -> str | None:
    """When a process of this machine began, in the kernel's ticks; None if there is none.

    A process id alone may belong to a later process.
    """
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/stat").read_text()
        return status.rpartition(")")[2].split()[19]
    return None
