"""Which processes belong to a cluster, how daemons are started and how all of them are ended.

A process is known by what it has from us, never by its name. Every daemon is started with two
variables of ours, which its children inherit. `slurmstepd` is one of them, although reparented at
once; since 24.11 it clears its environment, and is known by the socket it keeps in our folder. A
job's process has this cluster's SLURM_CONF together with the node's name. A user's shell has
SLURM_CONF too, but no node name, and is left alone. A job's process that cleared its environment
and left its parents is still known where nodes have a mount namespace of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_pt.devcluster.deadlines import wait_until
from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

FOLDER_MARK = "SLURM_PT_DEVCLUSTER_DAEMON"
ROLE_MARK = "SLURM_PT_DEVCLUSTER_ROLE"

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Process:
    """One line of the process table, as far as it concerns a cluster."""

    pid: int
    parent: int
    program: str
    """The name of the file that runs, for daemons; empty where we may not look."""
    folder: str
    role: str
    """slurmctld, slurmd-n1, ...: of the daemon, or of the daemon that it descends from."""
    slurm_conf: str
    node: str
    """The node on which it is a job's process; empty elsewhere."""
    namespace: str
    """Its mount namespace."""

    @property
    def is_daemon(self) -> bool:
        """Whether it runs its role's program itself: Debian's file is called slurmd-wlm."""
        return bool(self.role) and self.program.startswith(program_of(self.role))

    @property
    def is_on_node(self) -> bool:
        """Whether it is a node's daemon or the keeper of a step on it."""
        return self.role.startswith("slurmd-") and self.program.startswith(("slurmd", "slurmstepd"))


def program_of(role: str) -> str:
    """The program that runs as `role`: slurmd for slurmd-n1, else of the same name."""
    return role.partition("-")[0]


def read_processes(folder: Path) -> list[Process]:
    """The processes that we may look at, told apart for the cluster in `folder`.

    What may not be looked at belongs to another user, and so is not the cluster's.
    """
    sockets = _step_sockets(folder)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                process = _read_process(entry)
                node = "" if process.folder else _keeps_one_of(entry, sockets)
                if node:
                    role, program = f"slurmd-{node}", _program_in(entry)
                    process = replace(process, folder=str(folder), role=role, program=program)
            except OSError:  # it has just ended, or belongs to somebody else
                continue
            found.append(process)
    return found


def _step_sockets(folder: Path) -> dict[str, str]:
    """Open sockets in the nodes' spool folders, as links in /proc/PID/fd name them, to the node."""
    spool = f"{folder}/spool/"
    sockets = {}
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7].startswith(spool):
            sockets[f"socket:[{fields[6]}]"] = fields[7].removeprefix(spool).partition("/")[0]
    return sockets


def _keeps_one_of(entry: Path, sockets: Mapping[str, str]) -> str:
    """The node of the socket that the process holds; empty if it holds none of them."""
    if not sockets:
        return ""
    for link in (entry / "fd").iterdir():
        try:
            node = sockets.get(str(link.readlink()))
        except OSError:  # closed meanwhile
            continue
        if node:
            return node
    return ""


def _program_in(entry: Path) -> str:
    return (entry / "exe").readlink().name.removesuffix(" (deleted)")


def _read_process(folder: Path) -> Process:
    environ = _parse_environ((folder / "environ").read_bytes())
    # The program's name stands in parentheses and may itself contain some.
    after_name = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    program = ""
    if FOLDER_MARK in environ:
        program = _program_in(folder)
    return Process(
        pid=int(folder.name),
        parent=int(after_name[1]),
        program=program,
        folder=environ.get(FOLDER_MARK, ""),
        role=environ.get(ROLE_MARK, ""),
        slurm_conf=environ.get("SLURM_CONF", ""),
        node=environ.get("SLURMD_NODENAME", ""),
        namespace=str((folder / "ns" / "mnt").readlink()),
    )


def _parse_environ(raw: bytes) -> dict[str, str]:
    """The variables in /proc/PID/environ that tell whose a process is."""
    wanted = {FOLDER_MARK, ROLE_MARK, "SLURM_CONF", "SLURMD_NODENAME"}
    pairs = (entry.partition("=") for entry in os.fsdecode(raw).split("\0"))
    return {name: value for name, _, value in pairs if name in wanted}


def node_namespaces(
    processes: Iterable[Process], *, folder: Path, node: str = ""
) -> frozenset[str]:
    """The namespaces of all nodes, or of one, as long as a daemon or step of it runs.

    Never the machine's: to end all that is in that one would end the machine.
    """
    everything = list(processes)
    ours = [process for process in everything if process.folder == str(folder)]
    machine = {process.namespace for process in ours if not process.is_on_node}
    machine |= {process.namespace for process in everything if process.pid == os.getpid()}
    role = f"slurmd-{node}" if node else ""
    nodes = {p.namespace for p in ours if p.is_on_node and role in ("", p.role)}
    return frozenset(nodes - machine)


def select_cluster(
    processes: Iterable[Process],
    *,
    folder: Path,
    slurm_conf: Path,
    node: str = "",
    namespaces: frozenset[str] = frozenset(),
) -> list[Process]:
    """The cluster's daemons, steps and jobs with all their descendants; or those of one node."""
    everything = list(processes)
    role = f"slurmd-{node}" if node else ""
    chosen = {
        process.pid: process
        for process in everything
        if (process.folder == str(folder) and role in ("", process.role))
        or (process.slurm_conf == str(slurm_conf) and process.node and node in ("", process.node))
        or process.namespace in namespaces
    }
    while True:
        # A job may clear its children's environment; it cannot clear their parent.
        children = [p for p in everything if p.parent in chosen and p.pid not in chosen]
        if not children:
            break
        chosen |= {process.pid: process for process in children}
    # `down` may be called from within a job, and must live to finish.
    return [process for process in chosen.values() if process.pid != os.getpid()]


def end_processes(find: Callable[[], list[Process]], *, timeout_s: float = 15.0) -> None:
    """Kills what `find` returns until it returns nothing: killed parents may leave new children."""

    def none_left() -> bool:
        left = find()
        send_signal(left, signal.SIGKILL)
        return not left

    if not wait_until(none_left, timeout_s=timeout_s, poll_s=0.02):
        pids = ", ".join(f"{p.pid} ({p.role or p.program or p.node})" for p in find())
        raise DevClusterError(
            f"processes {pids} of the cluster did not end within {timeout_s:g} s of SIGKILL, so "
            f"the machine holds them in the kernel. To fix: run `slurm-pt devcluster down` again."
        )


def send_signal(processes: Iterable[Process], number: signal.Signals) -> None:
    """Signals each process; one that has ended meanwhile is no error."""
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def daemon_environment(folder: Path, role: str, extra: Mapping[str, str]) -> dict[str, str]:
    """What a daemon sees: nothing of the caller's SLURM_* or site settings, and our two marks."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TZ") if name in os.environ}
    return {"PATH": _SYSTEM_PATH, **kept, **extra, FOLDER_MARK: str(folder), ROLE_MARK: role}


def start_daemon(
    command: Sequence[str], *, environment: Mapping[str, str], output: Path, cwd: Path
) -> int:
    """The pid of `command`, started in a session of its own and no child of ours.

    Not a child: the caller need not reap it, and it outlives the caller's terminal.
    """
    # A shell's background commands ignore INT and QUIT, and jobs would inherit that: undone by env.
    script = (
        'output=$1; shift; env --default-signal=INT,QUIT "$@" </dev/null >>"$output" 2>&1 & echo $!'
    )
    started = subprocess.run(
        ["/bin/sh", "-c", script, "sh", str(output), *command],
        env=dict(environment),
        cwd=cwd,
        start_new_session=True,
        umask=0o022,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return int(started.stdout)
