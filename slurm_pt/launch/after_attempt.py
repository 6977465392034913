"""What follows an attempt: a pure decision from records, Slurm's view, history and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slurm_pt.launch.preemption import StopCause

FINISHED = 0
USER_ERROR = 2
WANTS_REQUEUE = 75
"""A rank stopped on request with its checkpoint committed (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True)
class ExitRecord:
    """How one rank ended, in its own words."""

    rank: int
    host: str
    code: int
    reason: str
    time: float
    step: int | None = None
    """Optimizer steps completed."""
    cause: str | None = None
    """A StopCause, from the rank that asked Slurm."""


class Outcome(Enum):
    """How an attempt ended."""

    finished = "finished"
    preempted = "preempted"
    timed_out = "timed out"
    cancelled = "cancelled"
    stopped = "stopped"
    """On request, for a reason that Slurm did not tell."""
    failed = "failed"
    user_error = "user error"


@dataclass(frozen=True)
class PastAttempt:
    """What the history says of one attempt."""

    outcome: Outcome
    first_step: int
    """Committed step when it began."""
    last_step: int
    """Committed step when it ended."""

    @property
    def made_progress(self) -> bool:
        return self.last_step > self.first_step


@dataclass(frozen=True)
class Decision:
    """What to do now, and why, for the owner of the run to read."""

    action: str
    """`none` (finished), `requeue` or `stop`."""
    outcome: Outcome
    reason: str
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        return {
            "action": self.action,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "exit_code": self.exit_code,
        }


def decide(
    *,
    records: Sequence[ExitRecord],
    world_size: int,
    srun_code: int,
    srun_said: str,
    cause: StopCause,
    progress: tuple[int, int],
    history: Sequence[PastAttempt],
    max_failures: int,
) -> Decision:
    """Requeue, stop, or nothing to do.

    `cause` is Slurm's view; `progress` the committed steps before and after this attempt;
    `history` the attempts before it, oldest first. Preemptions and time limits are never counted
    as failures; an attempt that was stopped for no known reason and saved nothing is.
    """
    codes = {record.code for record in records}
    if len(records) == world_size and codes == {FINISHED}:
        return Decision("none", Outcome.finished, "finished", FINISHED)
    mistakes = [record for record in records if record.code == USER_ERROR]
    if mistakes:
        return Decision("stop", Outcome.user_error, mistakes[0].reason, USER_ERROR)
    told = next((StopCause(r.cause) for r in records if r.cause is not None), StopCause.unknown)
    cause = told if cause is StopCause.unknown else cause
    asked_to_stop = WANTS_REQUEUE in codes and codes <= {WANTS_REQUEUE, FINISHED}
    if cause is StopCause.cancelled:
        return Decision("stop", Outcome.cancelled, "cancelled by the user", WANTS_REQUEUE)
    if cause in {StopCause.preempted, StopCause.timed_out}:
        outcome = Outcome(cause.value)
        saved = f"step {progress[1]} is committed" if progress[1] else "nothing was committed yet"
        return Decision("requeue", outcome, f"{outcome.value}; {saved}", WANTS_REQUEUE)
    first, last = progress
    if asked_to_stop and last > first:
        reason = f"stopped by a signal; step {last} is committed"
        return Decision("requeue", Outcome.stopped, reason, WANTS_REQUEUE)
    failure = describe_failure(records, world_size, srun_code, srun_said)
    return _after_failure(failure, srun_code, progress, history, max_failures, codes)


def _after_failure(
    failure: str,
    srun_code: int,
    progress: tuple[int, int],
    history: Sequence[PastAttempt],
    max_failures: int,
    codes: set[int],
) -> Decision:
    code = next((c for c in sorted(codes) if c not in {FINISHED, WANTS_REQUEUE}), srun_code) or 1
    first, last = progress
    in_a_row = 1
    if last <= first:
        for past in reversed(history):
            if past.outcome not in {Outcome.failed, Outcome.stopped}:
                continue  # a preemption in between neither counts nor wipes the slate
            if past.made_progress:
                break
            in_a_row += 1
    if in_a_row > max_failures:
        plural = "s" if in_a_row > 1 else ""
        reason = (
            f"{failure}. Given up after {in_a_row} failed attempt{plural} in a row without a new "
            f"committed step (slurm.max_failures={max_failures})"
        )
        return Decision("stop", Outcome.failed, reason, code)
    return Decision("requeue", Outcome.failed, f"{failure}. Trying again from step {last}", code)


def describe_failure(
    records: Sequence[ExitRecord], world_size: int, srun_code: int, srun_said: str
) -> str:
    """The first thing that went wrong: which rank, where, and how.

    A rank that left no record was killed; the others then fail because of it, so it comes first.
    """
    silent = sorted(set(range(world_size)) - {record.rank for record in records})
    failed = [r for r in records if r.code not in {FINISHED, WANTS_REQUEUE}]
    if not records:
        return f"no rank left a record; srun ended with {srun_code}{_quote(srun_said)}"
    if silent:
        named = ", ".join(map(str, silent[:8])) + (" ..." if len(silent) > 8 else "")
        return f"rank {named} left no record, so it was killed{_quote(srun_said)}"
    if not failed:
        return f"all ranks left on request, but srun ended with {srun_code}{_quote(srun_said)}"
    first = min(failed, key=lambda record: record.time)
    at = "" if first.step is None else f" at step {first.step}"
    return f"rank {first.rank} on {first.host} failed first{at}: {first.reason}"


def _quote(srun_said: str) -> str:
    lines = [line.strip() for line in srun_said.splitlines() if "error:" in line or "fatal" in line]
    return f" (srun: {lines[0]})" if lines else ""
