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
    for name in ("RUN", "JOB", "STATE", "STEP", "LOSS", "TOK/S", "TRY", "WHY"):
        table.add_column(
            name,
            justify="right" if name in {"STEP", "LOSS", "TOK/S", "TRY"} else "left",
            no_wrap=name != "WHY",
            overflow="ellipsis",
        )
    for row in rows:
        table.add_row(*_cells(row))
    return table


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
        "-" if row.attempt is None else str(row.attempt + 1),
        "" if row.state.reason == "None" else row.state.reason,
    ]
