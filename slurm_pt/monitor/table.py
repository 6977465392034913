"""Status rows as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from slurm_pt.monitor.status import RunStatus
from slurm_pt.submit.run_state import RunPhase

_STYLES = {
    RunPhase.finished: "green",
    RunPhase.running: "cyan",
    RunPhase.failed: "bold red",
    RunPhase.cancelled: "yellow",
    RunPhase.stopped: "yellow",
    RunPhase.unknown: "magenta",
    RunPhase.held: "yellow",
}


def render_table(rows: Sequence[RunStatus], *, note: str = "") -> Table:
    """One line a run: state, progress, loss, speed, attempt, and the reason where there is one."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state.phase.value] = counts.get(row.state.phase.value, 0) + 1
    summary = ", ".join(f"{number} {name}" for name, number in counts.items())
    table = Table(box=None, pad_edge=False, caption=note or None, caption_justify="left")
    table.title, table.title_justify = summary, "left"
    points = _points(rows)
    names = ["RUN", "JOB", "STATE", "STEP", "LOSS", "TOK/S", "TRY", "WHY"]
    if any(points):
        names.insert(1, "POINT")
    for name in names:
        # In a narrow terminal these two take several lines, and all else stays whole.
        long = name in {"POINT", "WHY"}
        table.add_column(
            name,
            justify="right" if name in {"STEP", "LOSS", "TOK/S", "TRY"} else "left",
            no_wrap=not long,
            overflow="fold" if long else "ellipsis",
        )
    for row, point in zip(rows, points, strict=True):
        cells = _cells(row)
        table.add_row(*(cells[:1] + ([point] if any(points) else []) + cells[1:]))
    return table


def _points(rows: Sequence[RunStatus]) -> list[str]:
    """What sets each run apart from the others shown: the overrides that not all of them have."""
    shared = set.intersection(*(set(row.overrides) for row in rows)) if rows else set()
    return [" ".join(_short(o) for o in row.overrides if o not in shared) for row in rows]


def _short(override: str) -> str:
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _cells(row: RunStatus) -> list[Text | str]:
    phase = row.state.phase
    progress = "-" if row.step is None else f"{row.step}/{row.steps or '?'}"
    return [
        row.run.name,
        row.state.job_key or "-",
        Text(phase.value, style=_STYLES.get(phase, "")),
        progress,
        "-" if row.loss is None else f"{row.loss:.3f}",
        "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
        "-" if row.attempt is None else str(row.attempt),
        _why(row),
    ]


def _why(row: RunStatus) -> str:
    """The reason in one line: the end of the last attempt matters more than Slurm's word."""
    reason = "" if row.state.reason in {"None", row.state.phase.value} else row.state.reason
    if row.state.phase in {RunPhase.waiting, RunPhase.running} and row.last_end:
        reason = f"again after: {row.last_end}"
    elif row.state.phase is RunPhase.running and not row.step:
        reason = reason or "starting"
    return " ".join(reason.split())
