"""The table of runs, as wide as a terminal is."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from slurm_pt.monitor.status import read_status
from slurm_pt.monitor.table import render_table
from tests.builders import make_run, seen_as


def test_in_a_narrow_terminal_name_state_and_step_stay_whole(tmp_path):
    long = [f"model.some_long_key_{number}=a_long_value" for number in range(4)]
    rows = [
        replace(
            read_status(make_run(tmp_path / str(number)), seen_as("RUNNING")),
            overrides=[*long, f"train.seed={number}"],
            step=12,
            steps=100,
        )
        for number in range(2)
    ]
    rows[1] = replace(rows[1], overrides=[])
    console = Console(width=80, record=True)
    with console.capture() as shown:
        console.print(render_table(rows))
    text = shown.get()
    for row in rows:
        assert row.run.name in text
        assert row.state.phase.value in text
    assert text.count("12/100") == 2
