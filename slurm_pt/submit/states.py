"""What each of Slurm's job states means for the person who waits."""

from __future__ import annotations

from enum import Enum


class JobPhase(Enum):
    """The six things that can be true of a job."""

    waiting = "waiting"
    held = "held"
    running = "running"
    ended_well = "ended well"
    ended_badly = "ended badly"
    unknown = "unknown"


_PHASES = {
    "PENDING": JobPhase.waiting,
    "CONFIGURING": JobPhase.waiting,
    "REQUEUED": JobPhase.waiting,
    "REQUEUE_FED": JobPhase.waiting,
    "RESV_DEL_HOLD": JobPhase.held,
    "REQUEUE_HOLD": JobPhase.held,
    "SPECIAL_EXIT": JobPhase.held,
    "RUNNING": JobPhase.running,
    "RESIZING": JobPhase.running,
    "SIGNALING": JobPhase.running,
    "STAGE_OUT": JobPhase.running,
    # COMPLETING is neither success nor failure: the job has not let go of its nodes yet.
    "COMPLETING": JobPhase.running,
    "SUSPENDED": JobPhase.held,
    "STOPPED": JobPhase.held,
    "COMPLETED": JobPhase.ended_well,
    "BOOT_FAIL": JobPhase.ended_badly,
    "CANCELLED": JobPhase.ended_badly,
    "DEADLINE": JobPhase.ended_badly,
    "FAILED": JobPhase.ended_badly,
    "LAUNCH_FAILED": JobPhase.ended_badly,
    "NODE_FAIL": JobPhase.ended_badly,
    "OUT_OF_MEMORY": JobPhase.ended_badly,
    "PREEMPTED": JobPhase.ended_badly,
    "RECONFIG_FAIL": JobPhase.ended_badly,
    "REVOKED": JobPhase.ended_badly,
    "TIMEOUT": JobPhase.ended_badly,
}
_HELD_REASONS = ("held", "Held")


def parse_state(text: str) -> str:
    """Slurm's state word alone: `CANCELLED by 1000` and `CANCELLED+` are CANCELLED.

    >>> parse_state("CANCELLED by 1000"), parse_state("completing+"), parse_state("")
    ('CANCELLED', 'COMPLETING', '')
    """
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""


def job_phase(state: str, reason: str = "") -> JobPhase:
    """The phase of a job in a Slurm state; `reason` tells a held job from a waiting one.

    >>> job_phase("PENDING", "JobHeldUser"), job_phase("NODE_FAIL"), job_phase("NEWSTATE")
    (<JobPhase.held: 'held'>, <JobPhase.ended_badly: 'ended badly'>, <JobPhase.unknown: 'unknown'>)
    """
    phase = _PHASES.get(parse_state(state), JobPhase.unknown)
    if phase is JobPhase.waiting and any(word in reason for word in _HELD_REASONS):
        return JobPhase.held
    return phase
