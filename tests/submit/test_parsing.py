"""What Slurm's commands print, replayed to the parsers."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt.submit.slurm import JobView, StopView, parse_sacct, parse_squeue, parse_stop
from slurm_pt.submit.states import JobPhase

SQUEUE = """\
12|12|RUNNING|2026-01-01T10:00:00|2026-01-01T11:00:00|1:00:00|2|None
13_4|17|PENDING|N/A|N/A|UNLIMITED|1|Resources
13_5|13|PENDING|N/A|N/A|UNLIMITED|1|JobHeldUser
14|14|PENDING|N/A|N/A|1:00|1|Nodes required for job are DOWN, DRAINED or reserved | by others
15+1|16|RUNNING|2026-01-01T10:00:00|N/A|1:00|1|None
"""


def test_squeues_answer_becomes_jobs_by_key():
    views = {view.job_key: view for view in parse_squeue(SQUEUE)}
    assert views["12"] == JobView(
        "12", "12", "RUNNING", "None", "2026-01-01T10:00:00", "2026-01-01T11:00:00", "1:00:00", "2"
    )
    assert views["13_4"].job_id == "17"
    assert views["13_5"].phase is JobPhase.held
    assert views["14"].reason.endswith("| by others")
    assert set(views) == {"12", "13_4", "13_5", "14", "15+1"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "JOBID|...",
        "12|12|RUNN",
        "12|12|RUNNING|a|b|c|d",
        "name|12|RUNNING|a|b|c|1|None",
        "13_[4-7]|13|PENDING|a|b|c|1|None",
    ],
)
def test_a_line_of_another_shape_is_left_out_f80(line):
    assert parse_squeue(f"{line}\n{SQUEUE}") == parse_squeue(SQUEUE)


@given(st.text())
def test_no_text_breaks_a_parser_f86(text):
    parse_squeue(text)
    parse_sacct(text)
    parse_stop(text)


def test_saccts_answer_becomes_jobs_by_key_f79():
    output = "12|12|CANCELLED by 1000\n13_4|17|OUT_OF_MEMORY\n13_[5-7]|13|PENDING\n12.batch|x|y\n"
    assert {view.job_key: view.state for view in parse_sacct(output)} == {
        "12": "CANCELLED",
        "13_4": "OUT_OF_MEMORY",
    }


def columns(*fields: str) -> str:
    return "".join(field.ljust(32) for field in fields) + "\n"


@pytest.mark.parametrize(
    ("fields", "end", "preempt"),
    [
        (("RUNNING", "2026-01-01T11:00:00", "N/A", "None"), "2026-01-01T11:00:00", None),
        (("SIGNALING", "2026-01-01T11:00:15", "2026-01-01T11:00:00", "None"),) * 1
        + ("2026-01-01T11:00:15", "2026-01-01T11:00:00"),
        # No time limit: squeue hides the end of the grace as well.
        (("RUNNING", "NONE", "2026-01-01T11:00:00", "None"), None, "2026-01-01T11:00:00"),
        (("PENDING", "N/A", "N/A", "Resources"), None, None),
        (("COMPLETING", "2026-01-01T11:00:00", "(null)", "TimeLimit"), "2026-01-01T11:00:00", None),
    ],
)
def test_the_times_of_a_stop_are_unix_seconds_or_none_f28(fields, end, preempt):
    def unix(text):
        return None if text is None else datetime.fromisoformat(text).timestamp()

    view = parse_stop(columns(*fields))
    assert view == StopView(fields[0], unix(end), unix(preempt), fields[3])


def test_a_job_that_squeue_does_not_list_is_none():
    assert parse_stop("") is None
