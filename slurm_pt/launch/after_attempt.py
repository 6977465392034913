"""What follows an attempt: a pure decision from records, Slurm's view, history and budgets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from slurm_pt.launch.preemption import StopCause

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    `history` the attempts before it, oldest first. Preemptions are never counted as failures. A
    time limit, or a stop for no known reason, is one if it came before a new step was committed:
    the next attempt would end just so.
    """
    codes = {record.code for record in records}
    first, last = progress
    if len(records) == world_size and codes == {FINISHED}:
        return Decision("none", Outcome.finished, "finished", FINISHED)
    mistakes = [record for record in records if record.code == USER_ERROR]
    if mistakes:
        earliest = min(mistakes, key=lambda record: record.time)
        return Decision("stop", Outcome.user_error, earliest.reason, USER_ERROR)
    told = next((StopCause(r.cause) for r in records if r.cause is not None), StopCause.unknown)
    cause = told if cause is StopCause.unknown else cause
    if cause is StopCause.cancelled:
        return Decision("stop", Outcome.cancelled, "cancelled by the user", WANTS_REQUEUE)
    saved = f"step {last} is committed" if last else "nothing was committed yet"
    if cause is StopCause.preempted:
        return Decision("requeue", Outcome.preempted, f"preempted; {saved}", WANTS_REQUEUE)
    if cause is StopCause.timed_out and last > first:
        return Decision("requeue", Outcome.timed_out, f"timed out; {saved}", WANTS_REQUEUE)
    if cause is StopCause.timed_out:
        outcome, failure = Outcome.timed_out, "timed out before a new step was committed"
        code = WANTS_REQUEUE
    elif WANTS_REQUEUE in codes and codes <= {WANTS_REQUEUE, FINISHED} and last > first:
        reason = f"stopped by a signal; {saved}"
        return Decision("requeue", Outcome.stopped, reason, WANTS_REQUEUE)
    else:
        outcome = Outcome.failed
        failure = describe_failure(records, world_size, srun_code, srun_said)
        code = next((c for c in sorted(codes - {FINISHED, WANTS_REQUEUE})), srun_code) or 1
    in_a_row = failures_in_a_row(progress, history)
    if in_a_row >= max_failures:
        limit = f"slurm.max_failures={max_failures}"
        tries = f"{in_a_row} attempt{'s' if in_a_row != 1 else ''}"
        reason = f"{failure}. Given up: {tries} in a row without a new committed step ({limit})"
        return Decision("stop", outcome, reason, code)
    return Decision("requeue", outcome, f"{failure}. Trying again from step {last}", code)


def failures_in_a_row(progress: tuple[int, int], history: Sequence[PastAttempt]) -> int:
    """How many attempts, this failed one included, have ended without a new committed step.

    A preemption in between neither counts nor wipes the slate; a committed step does, even one of
    an attempt that left no record.
    """
    first, last = progress
    if last > first:
        return 0
    in_a_row = 1
    for past in reversed(history):
        if past.made_progress or past.last_step < first:
            break
        in_a_row += past.outcome in {Outcome.failed, Outcome.stopped, Outcome.timed_out}
    return in_a_row


_LOST_A_PEER = re.compile(
    r"connection (?:was )?(?:reset|closed|refused|aborted)|closed by peer|broken pipe|"
    r"remote (?:process|worker)|ncclRemoteError|LostRankError|socket (?:closed|timeout)",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store say on a rank whose peer is gone."""


def describe_failure(
    records: Sequence[ExitRecord], world_size: int, srun_code: int, srun_said: str
) -> str:
    """The first thing that went wrong: which rank, where, and how.

    A rank that lost the connection to another failed because of it, and srun may well name it
    first: it counts only where nobody else can have been the cause. Among the others srun's order
    decides, in which the tasks ended; without its word, the earliest record.
    """
    if not records:
        return f"no rank left a record; srun ended with {srun_code}{_quote(srun_said)}"
    failed = {r.rank: r for r in records if r.code not in {FINISHED, WANTS_REQUEUE}}
    silent = sorted(set(range(world_size)) - {record.rank for record in records})
    own = {
        rank: record for rank, record in failed.items() if not _LOST_A_PEER.search(record.reason)
    }
    suspects = own if own or silent else failed
    order = _tasks_in_order(srun_said)
    named = next((rank for rank in order if rank in suspects or rank in silent), None)
    if named in suspects:
        return _describe_record(suspects[named])
    if named is None and suspects:
        return _describe_record(min(suspects.values(), key=lambda record: record.time))
    if silent:
        shown = ", ".join(map(str, silent[:8])) + (" ..." if len(silent) > 8 else "")
        who = shown if named is None else named
        return f"rank {who} left no record, so it was killed{_quote(srun_said, named)}"
    return f"all ranks left on request, but srun ended with {srun_code}{_quote(srun_said)}"


def _describe_record(record: ExitRecord) -> str:
    at = "" if record.step is None else f" at step {record.step}"
    return f"rank {record.rank} on {record.host} failed first{at}: {record.reason}"


def _tasks_in_order(srun_said: str) -> Iterator[int]:
    """The tasks in lines such as `srun: error: n2: tasks 0-1,3: Killed`."""
    for spans in re.findall(r"\btasks? ([0-9,-]+): ", srun_said):
        for span in spans.split(","):
            low, _, high = span.partition("-")
            yield from range(int(low), int(high or low) + 1)


def _quote(srun_said: str, rank: int | None = None) -> str:
    """What srun said about a rank, or its first error."""
    lines = [line.strip() for line in srun_said.splitlines() if "error:" in line or "fatal" in line]
    about = [line for line in lines if rank in set(_tasks_in_order(line))]
    return f" ({(about or lines)[0]})" if lines else ""
