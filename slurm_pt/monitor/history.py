"""What happened to a run, from its own records: attempts, steps lost, time to commit, losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurm_pt.files import read_json_lines
from slurm_pt.run_dir import RunDir


@dataclass(frozen=True)
class RunHistory:
    """The life of a run in a few figures."""

    attempts: int
    outcomes: tuple[str, ...]
    """How each attempt ended, oldest first."""
    steps_lost: int
    """Optimizer steps that were done and had to be done again, over all attempts."""
    signal_to_commit_s: tuple[float, ...]
    """For each stop on request: seconds from the signal to the committed checkpoint."""


def read_history(run: RunDir) -> RunHistory:
    """The history of a run. Steps count as lost when a later attempt resumed from before them."""
    metrics = list(read_json_lines(run.metrics))
    events = run.read_events()
    resumed = {e["attempt"]: e["step"] for e in events if e["event"] == "resumed"}
    lost, reached = 0, 0
    for attempt in [a.number for a in run.list_attempts()]:
        lost += max(0, reached - resumed.get(attempt, 0))
        steps = [m["step"] for m in metrics if m.get("attempt") == attempt]
        # An attempt that made no step leaves things as they were.
        reached = max(steps, default=min(reached, resumed.get(attempt, 0)))
    return RunHistory(
        attempts=len(run.list_attempts()),
        outcomes=tuple(e["outcome"] for e in events if e["event"] == "attempt_ended"),
        steps_lost=lost,
        signal_to_commit_s=tuple(
            e["since_signal_s"]
            for e in events
            if e["event"] == "checkpoint_committed" and "since_signal_s" in e
        ),
    )


def first_difference(run: RunDir, other: RunDir, *, up_to: int | None = None) -> str | None:
    """Where two runs' losses or gradient norms differ in any bit; None if nowhere.

    Over all steps, or the first `up_to` of two runs of which one went on for longer.
    """
    mine, others = _losses(run), _losses(other)
    if not mine:
        return f"{run.metrics} holds no step"
    for step in sorted(mine.keys() | others.keys()) if up_to is None else range(1, up_to + 1):
        if mine.get(step) != others.get(step):
            return f"step {step}: {mine.get(step)} in {run.name}, {others.get(step)} in the other"
    return None


def _losses(run: RunDir) -> dict[int, tuple[Any, Any]]:
    # JSON writes floats so that they read back exactly: equal values are equal bits.
    return {step: (m["loss"], m["grad_norm"]) for step, m in run.read_metrics().items()}
