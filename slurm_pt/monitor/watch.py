"""A live table until every run has ended: the folders often, the controller seldom."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.live import Live

from slurm_pt.errors import SubmitError
from slurm_pt.monitor.status import RunStatus, read_status, with_accounting
from slurm_pt.monitor.table import render_table
from slurm_pt.run_dir import RunDir
from slurm_pt.submit.slurm import JobView, SlurmClient

REFRESH_S = 1.0
FAST_POLL_S = 3.0
"""Pause between questions in the first minute, when jobs start or are refused."""


def watch(
    runs: Sequence[RunDir], *, client: SlurmClient | None, poll_s: float, console: Console
) -> list[RunStatus] | None:
    """The last status of each run, in their order, once all have ended; None after Ctrl-C."""
    jobs: Mapping[str, JobView] | None = None
    asked, note, started = 0.0, "", time.monotonic()
    try:
        with Live(console=console, refresh_per_second=2, transient=not console.is_terminal) as live:
            while True:
                pause_s = min(FAST_POLL_S, poll_s) if time.monotonic() - started < 60 else poll_s
                if client is not None and time.monotonic() - asked >= pause_s:
                    jobs, note = _ask(client, runs)
                    asked = time.monotonic()
                rows = [read_status(run, jobs) for run in runs]
                live.update(render_table(rows, note=note))
                if all(row.state.phase.is_final for row in rows):
                    break
                time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        return None
    if not console.is_terminal:
        console.print(render_table(rows))
    return rows


def _ask(client: SlurmClient, runs: Sequence[RunDir]) -> tuple[Mapping[str, JobView] | None, str]:
    try:
        return with_accounting(runs, client.query_my_jobs(), client), ""
    except SubmitError as error:
        return None, f"states unknown: {error}"
