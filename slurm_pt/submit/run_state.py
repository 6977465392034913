"""Where a run stands, from its folder and from one answer of Slurm. Final only on evidence."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from slurm_pt.files import find_json
from slurm_pt.owner import HEARTBEAT_GRACE_S, boot_id, heartbeat_age_s, pid_start_time, read_owner
from slurm_pt.run_dir import RunDir
from slurm_pt.submit.states import JobPhase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_pt.submit.slurm import JobView

SETTLING_S = 60.0
"""How long squeue, the accounting and a shared file system may disagree after a change."""


class RunPhase(Enum):
    """The state of a run, in the words that `slurm-pt status` prints."""

    not_submitted = "not submitted"
    waiting = "waiting"
    held = "held"
    running = "running"
    finished = "finished"
    failed = "failed"
    cancelled = "cancelled"
    stopped = "stopped"
    unknown = "unknown"

    @property
    def is_final(self) -> bool:
        return self in {RunPhase.finished, RunPhase.failed, RunPhase.cancelled, RunPhase.stopped}

    @property
    def is_alive(self) -> bool:
        """Whether submitting the run again would be one time too many."""
        return self in {RunPhase.waiting, RunPhase.held, RunPhase.running, RunPhase.unknown}


@dataclass(frozen=True)
class RunState:
    """A run's phase, why, and the job that it belongs to."""

    phase: RunPhase
    reason: str = ""
    job_key: str | None = None
    slurm_state: str | None = None
    """Slurm's own word; None where it gave none."""
    is_forgotten: bool = False
    """Failed only because squeue no longer lists the job; the accounting may know more."""


_FROM_JOB = {
    JobPhase.waiting: RunPhase.waiting,
    JobPhase.held: RunPhase.held,
    JobPhase.running: RunPhase.running,
}


_FROM_OUTCOME = {
    "cancelled": RunPhase.cancelled,
    # Started by hand: nobody requeues it.
    "stopped": RunPhase.stopped,
    "preempted": RunPhase.stopped,
    "timed out": RunPhase.stopped,
}


def run_state(run: RunDir, jobs: Mapping[str, JobView] | None) -> RunState:
    """The state of a run; `jobs` is what Slurm answered (None: it did not answer)."""
    job: dict[str, Any] | None = current_job(run)
    key = job.get("job_key") if job else None
    view = jobs.get(key) if jobs is not None and key else None
    leaving = view is not None and view.state == "COMPLETING" and run.done.exists()
    if view is not None and view.phase in _FROM_JOB and not leaving:
        return RunState(_FROM_JOB[view.phase], view.reason, key, view.state)
    if run.done.exists():
        return RunState(RunPhase.finished, "", key, view.state if view else None)
    if job is None:
        return _state_without_job(run)
    if key is None:
        return _state_of_local(run, job)
    return _state_of_ended(run, job, key, view, answered=jobs is not None)


def current_job(run: RunDir) -> dict[str, Any] | None:
    """The job that a run is in, or was in last: submitted by us, or `sbatch` or `srun` by hand."""
    submitted: dict[str, Any] | None = find_json(run.job)
    attempts = run.list_attempts()
    begin = find_json(attempts[-1].begin) if attempts else None
    key = begin["owner"]["job_key"] if begin else None
    if key is None or begin is None:
        return submitted
    if submitted and (submitted.get("job_key") == key or submitted["submitted"] > begin["time"]):
        return submitted
    return {"job_key": key, "submitted": begin["time"]}


def _state_without_job(run: RunDir) -> RunState:
    """A run that was started by hand outside Slurm, or not at all."""
    if not run.list_attempts():
        return RunState(RunPhase.not_submitted)
    recorded = _state_from_records(run, None, None)
    if recorded is not None:
        return recorded
    owner, age_s = read_owner(run), heartbeat_age_s(run)
    seen = age_s is not None and age_s < HEARTBEAT_GRACE_S
    if owner is not None and (owner.boot_id, owner.host) == (boot_id(), os.uname().nodename):
        seen = pid_start_time(owner.pid) == owner.pid_start
    if seen and last_decision(run) is None:
        return RunState(RunPhase.running, "started by hand")
    return RunState(RunPhase.failed, "ended without a word; the same command goes on with it")


def _state_of_local(run: RunDir, job: dict[str, Any]) -> RunState:
    recorded = _state_from_records(run, None, None, since=job["submitted"])
    if recorded is not None:
        return recorded
    if job["host"] != os.uname().nodename:  # its processes cannot be seen from here
        age_s = heartbeat_age_s(run)
        if age_s is not None and age_s < HEARTBEAT_GRACE_S:
            return RunState(RunPhase.running, f"local processes of {job['host']}")
        return RunState(RunPhase.unknown, f"ask on {job['host']}, where its processes are")
    if pid_start_time(job["pid"]) == job["pid_start"]:
        phase = RunPhase.running if run.list_attempts() else RunPhase.waiting
        return RunState(phase, "local processes")
    return RunState(RunPhase.failed, "the local launcher is gone")


def _state_of_ended(
    run: RunDir, job: dict[str, Any], key: str, view: JobView | None, *, answered: bool
) -> RunState:
    """A job that Slurm says has ended, or no longer lists, without done.json."""
    word = view.state if view else None
    if word == "CANCELLED":
        return RunState(RunPhase.cancelled, "cancelled", key, word)
    recorded = _state_from_records(run, key, word, since=job["submitted"])
    if recorded is not None:
        return recorded
    if not answered:
        return RunState(RunPhase.unknown, "no answer from Slurm", key)
    says_failed = view is not None and view.phase is JobPhase.ended_badly
    if not says_failed and time.time() - job["submitted"] < SETTLING_S:
        return RunState(RunPhase.unknown, "submitted a moment ago", key, word)
    if view is None:
        reason = "Slurm no longer lists the job, and it left no record"
        return RunState(RunPhase.failed, reason, key, is_forgotten=True)
    if view.phase is JobPhase.unknown:
        return RunState(RunPhase.unknown, f"Slurm says {word}", key, word)
    said = "COMPLETED, but the run left no done.json" if word == "COMPLETED" else word or ""
    why = f" ({view.reason})" if view.reason not in {"", "None"} else ""
    return RunState(RunPhase.failed, f"Slurm says {said}{why}", key, word)


def last_decision(run: RunDir) -> dict[str, Any] | None:
    """What was decided after the newest attempt; None while it lasts."""
    attempts = run.list_attempts()
    return find_json(attempts[-1].end) if attempts else None


def _state_from_records(
    run: RunDir, key: str | None, word: str | None, *, since: float = 0.0
) -> RunState | None:
    decision = last_decision(run)
    if decision is None or decision["time"] < since or decision["action"] != "stop":
        return None
    phase = _FROM_OUTCOME.get(decision["outcome"], RunPhase.failed)
    return RunState(phase, decision["reason"], key, word)
