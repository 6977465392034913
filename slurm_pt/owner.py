"""Who may write a run folder: one job, one attempt. A second writer is refused."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_pt.errors import RunFolderError
from slurm_pt.files import find_json, read_json, write_json
from slurm_pt.run_dir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable

HEARTBEAT_GRACE_S = 180.0
"""Age at which a run's newest heartbeat no longer shows that somebody lives."""


@dataclass(frozen=True)
class Owner:
    """One writer, and what is needed to find out whether it still lives."""

    nonce: str
    host: str
    boot_id: str
    pid: int
    pid_start: str
    """Start time of the process, so that a recycled pid is not mistaken for it."""
    job_key: str | None
    """Slurm's id, of the array task where there is one."""
    restart_count: int
    time: float
    released: bool = False


def this_process(*, job_key: str | None, restart_count: int, pid: int | None = None) -> Owner:
    """An owner record for this process (or the one that it acts for) and its Slurm job."""
    pid = os.getpid() if pid is None else pid
    return Owner(
        nonce=secrets.token_hex(8),
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=pid,
        pid_start=pid_start_time(pid),
        job_key=job_key,
        restart_count=restart_count,
        time=time.time(),
    )


def read_owner(run: RunDir) -> Owner | None:
    """The writer on record, alive or not."""
    record: dict[str, Any] | None = find_json(run.owner)
    return None if record is None else Owner(**record)


def take_ownership(
    run: RunDir, owner: Owner, *, job_is_running: Callable[[str], bool | None]
) -> None:
    """Makes `owner` the run's only writer. Raises RunFolderError while another one lives.

    `job_is_running` answers for a Slurm job; None means that Slurm gave no answer.

    Each owner has one seat behind it that only one newcomer can ever take, and only once the owner
    is gone: to remove a dead owner's file instead would let a slow newcomer remove the next one's.
    """
    mine = run.owner.with_name(f".owner.{owner.nonce}")
    write_json(mine, asdict(owner))
    seat = run.owner
    try:
        while not _take_seat(mine, seat):
            current = Owner(**read_json(seat))
            if current.nonce == owner.nonce:  # NFS carried the link out and lost its answer
                break
            _refuse_while_alive(run, current, owner, job_is_running)
            seat = run.owner.with_name(f".owner.after.{current.nonce}")
        mine.replace(run.owner)
    finally:
        mine.unlink(missing_ok=True)


def _take_seat(mine: Path, seat: Path) -> bool:
    """Whether the record is in the seat now: the atomic test and set."""
    try:
        os.link(mine, seat)
    except FileExistsError:
        return False
    except OSError as error:
        raise RunFolderError(
            f"{seat} cannot be linked ({error.strerror}); without hard links two jobs cannot be "
            "kept apart. Set run_root to a folder on the cluster's shared file system"
        ) from error
    return True


def _refuse_while_alive(
    run: RunDir, current: Owner, newcomer: Owner, job_is_running: Callable[[str], bool | None]
) -> None:
    reason = _sign_of_life(run, current, newcomer, job_is_running)
    if reason is None:
        return
    who = f"Slurm job {current.job_key}" if current.job_key else f"process {current.pid}"
    cancel = f"slurm-pt cancel {shlex.quote(str(run.path))}"
    raise RunFolderError(
        f"{run.path} belongs to {who} on {current.host}, which {reason}; two writers would destroy "
        f"each other's checkpoints. Wait for it, or end it with `{cancel}`, "
        "or change a key that alters the result to get a run of its own"
    )


def _sign_of_life(
    run: RunDir,
    current: Owner,
    newcomer: Owner,
    job_is_running: Callable[[str], bool | None],
) -> str | None:
    """Why the current owner must be taken for alive, or None."""
    if current.released:
        return None
    same_place = (current.boot_id, current.host) == (newcomer.boot_id, newcomer.host)
    same_job = (current.job_key, current.restart_count) == (
        newcomer.job_key,
        newcomer.restart_count,
    )
    if same_place and same_job:
        # Two starts by hand: outside Slurm, or one after the other in one allocation.
        alive = pid_start_time(current.pid) == current.pid_start
        return "is running" if alive else None
    if current.job_key is not None:
        if current.job_key == newcomer.job_key and current.restart_count < newcomer.restart_count:
            return None  # the requeued job itself
        if current.job_key != newcomer.job_key:
            running = job_is_running(current.job_key)
            if running is not None:
                return "is running" if running else None
    elif same_place:  # and the newcomer is a Slurm job
        alive = pid_start_time(current.pid) == current.pid_start
        return "is running" if alive else None
    age_s = heartbeat_age_s(run)
    if age_s is not None and age_s < HEARTBEAT_GRACE_S:
        return f"gave a sign of life {age_s:.0f} s ago"
    return None


def release_ownership(run: RunDir, nonce: str) -> None:
    """Lets the next writer in at once. Does nothing if the run has another owner by now."""
    current = read_owner(run)
    if current is not None and current.nonce == nonce:
        write_json(run.owner, {**asdict(current), "released": True})


def check_ownership(run: RunDir, nonce: str) -> None:
    """Raises RunFolderError if the run has gone to another writer: nothing may be committed."""
    current = read_owner(run)
    if current is None or current.nonce != nonce:
        now = "nobody" if current is None else f"job {current.job_key} on {current.host}"
        raise RunFolderError(f"{run.path} was taken over by {now}; this attempt may not write it")


def heartbeat_age_s(run: RunDir) -> float | None:
    """Seconds since any rank's newest heartbeat; None if there is none."""
    newest = 0.0
    with contextlib.suppress(FileNotFoundError):
        for entry in run.heartbeats.iterdir():
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, entry.stat().st_mtime)
    return time.time() - newest if newest else None


def boot_id() -> str:
    """What tells this start of this machine from every other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def pid_start_time(pid: int) -> str:
    """The kernel's start time of a process; empty if there is none (or no /proc)."""
    try:
        # The command's name may hold spaces and brackets: count fields after the last ')'.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
