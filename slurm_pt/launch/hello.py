"""What each rank says about itself at the start, and what must be the same on all.

Pure, but for `make_hello`, which looks at this process.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from slurm_pt.launch.environment import RankInfo
from slurm_pt.launch.network import read_machine

_COMPARED_PACKAGES = ("torch", "slurm_pt", "numpy")


@dataclass(frozen=True)
class Hello:
    """One rank's facts. What is compared does not depend on the attempt."""

    rank: int
    world_size: int
    host: str
    """The node's name where the launcher tells it, else the machine's."""
    pid: int
    machine: str
    """Boot and network namespace (`network.read_machine`)."""
    versions: dict[str, str]
    code_digest: str = ""
    config_signature: str = ""
    devices: tuple[str, ...] = ()
    """UUIDs of the GPUs that this rank will use; empty on CPU, or where sharing one is meant."""
    affinity_cpus: int = 0
    problem: str | None = None
    """What this rank found wrong by itself: said here, it ends the start on all ranks at once."""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


def make_hello(
    info: RankInfo,
    *,
    code_digest: str = "",
    config_signature: str = "",
    devices: Iterable[str] = (),
    problem: str | None = None,
) -> Hello:
    """The Hello of this process. Versions come from the packages' metadata: nothing is imported."""
    return Hello(
        rank=info.rank,
        world_size=info.world_size,
        host=info.hosts[info.node_rank] if info.hosts else socket.gethostname(),
        pid=os.getpid(),
        machine=read_machine(),
        versions=_read_versions(),
        code_digest=code_digest,
        config_signature=config_signature,
        devices=tuple(devices),
        affinity_cpus=len(os.sched_getaffinity(0)),
        problem=problem,
    )


def parse_hello(record: Mapping[str, Any]) -> Hello:
    """A Hello from its JSON. Raises TypeError or ValueError for anything else."""
    known = {field.name for field in dataclasses.fields(Hello)}
    hello = Hello(**{name: value for name, value in record.items() if name in known})
    if not isinstance(hello.rank, int) or not isinstance(hello.world_size, int):
        raise ValueError("rank and world_size must be numbers")
    if not isinstance(hello.versions, dict):
        raise ValueError("versions must be a mapping")
    return dataclasses.replace(hello, devices=tuple(hello.devices))


def find_disagreement(known: Mapping[int, Hello], new: Hello) -> str | None:
    """Why `new` cannot join those who are there, rank 0 among them; None: it can."""
    first = known[0]
    if new.problem is not None:
        return f"{new.who}: {new.problem}"
    if new.world_size != first.world_size:
        return _differs(first, new, "world size", str(first.world_size), str(new.world_size)) + (
            "All ranks must belong to one start. To fix: start each rank once, with one launcher."
        )
    if not 0 <= new.rank < first.world_size:
        return (
            f"{new.who} does not exist in a world of {first.world_size}. To fix: start each rank "
            f"once, with one launcher."
        )
    if new.rank in known:
        return (
            f"two processes claim rank {new.rank}: process {known[new.rank].pid} on "
            f"{known[new.rank].host} and process {new.pid} on {new.host}. The launcher must start "
            f"each rank once. To fix: start one process per task (no loop or spawn inside a task)."
        )
    return _differing_facts(first, new) or _shared_device(known, new)


def _differing_facts(first: Hello, new: Hello) -> str | None:
    for name in sorted(first.versions.keys() | new.versions.keys()):
        here, there = first.versions.get(name, "none"), new.versions.get(name, "none")
        if here != there:
            return _differs(first, new, f"version of {name}", here, there) + (
                "All ranks must run the same software. To fix: use one environment that all nodes "
                "share (slurm.python), or one container image."
            )
    if first.code_digest != new.code_digest:
        return _differs(first, new, "program's code", first.code_digest, new.code_digest) + (
            "All ranks must run the same program. To fix: start again, with the code on a shared "
            "file system and left alone while the job starts."
        )
    if first.config_signature != new.config_signature:
        values = first.config_signature, new.config_signature
        return _differs(first, new, "configuration's signature", *values) + (
            "All ranks must read the same configuration. To fix: start all ranks from one run "
            "folder, without values that differ between nodes or moments."
        )
    return None


def _shared_device(known: Mapping[int, Hello], new: Hello) -> str | None:
    for other in known.values():
        for device in new.devices:
            if device in other.devices:
                return (
                    f"{other.who} and {new.who} use the same GPU {device}. Each rank needs its "
                    f"own. To fix: set slurm.gpus_per_node to the ranks per node, or start fewer "
                    f"ranks per node."
                )
    return None


def _differs(first: Hello, new: Hello, what: str, here: str, there: str) -> str:
    return f"ranks differ in the {what}: {here} on {first.who}, {there} on {new.who}. "


def _read_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _COMPARED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
