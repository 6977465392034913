from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_pt.errors import RunFolderError
from slurm_pt.files import (
    append_json_line,
)
from slurm_pt.monitor.status import find_runs
from slurm_pt.run_dir import RunDir, open_run
from tests.builders import commit_step, make_run


def test_a_folder_without_a_configuration_is_no_run(tmp_path):
    with pytest.raises(RunFolderError, match=r"is not a run folder .*slurm-pt status"):
        open_run(tmp_path)


def test_a_run_is_found_by_the_beginning_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt-1a", "gpt-1b", "gpt", "other-2c"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
    assert open_run("oth").name == "other-2c"
    assert open_run("gpt").name == "gpt"  # the whole name comes first
    with pytest.raises(RunFolderError, match="gpt- begins the names of 2 runs: gpt-1a, gpt-1b"):
        open_run("gpt-")
    assert [run.name for run in find_runs([Path("gpt-")])] == ["gpt-1a", "gpt-1b"]


def test_attempts_are_numbered_from_zero_and_sorted_as_numbers(tmp_path):
    run = make_run(tmp_path)
    assert run.list_attempts() == []
    assert [run.new_attempt().number for _ in range(12)] == list(range(12))
    (run.attempts / "rendezvous").mkdir()
    assert [attempt.number for attempt in run.list_attempts()] == list(range(12))
    assert run.list_attempts()[3].logs.is_dir()
    assert run.list_attempts()[3].exits.is_dir()


def test_a_run_without_folders_has_no_attempts_and_no_step(tmp_path):
    run = RunDir(tmp_path / "none")
    assert run.list_attempts() == []
    assert run.committed_step() == 0
    assert run.read_events() == []
    assert run.read_metrics() == {}


TAKE_ATTEMPTS = """
import sys
from slurm_pt.run_dir import open_run
run = open_run(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(*[run.new_attempt().number for _ in range(20)])
"""


def test_eight_starters_at_once_never_share_an_attempt_f71(tmp_path):
    run = make_run(tmp_path)
    command = [sys.executable, "-c", TAKE_ATTEMPTS, str(run.path)]
    starters = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for starter in starters:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "ready\n"
    for starter in starters:  # all wait at the same line
        assert starter.stdin is not None
        starter.stdin.write("go\n")
        starter.stdin.flush()
    numbers = [int(word) for starter in starters for word in starter.communicate()[0].split()]
    assert sorted(numbers) == list(range(160))
    assert len(run.list_attempts()) == 160


def test_only_committed_checkpoints_count_f45(tmp_path):
    run = make_run(tmp_path)
    commit_step(run, 5)
    commit_step(run, 10)
    (run.checkpoints / "step_30").mkdir()  # no manifest
    (run.checkpoints / "step_40.tmp").mkdir()
    (run.checkpoints / "step_40.tmp" / "manifest.json").write_text("{}")
    assert run.committed_step() == 10


def test_a_step_repeated_after_a_crash_counts_once_with_its_last_record(tmp_path):
    run = make_run(tmp_path)
    for step, loss in [(1, 3.0), (2, 2.0), (2, 2.5), (3, 1.0)]:
        append_json_line(run.metrics, {"step": step, "loss": loss})
    assert {step: m["loss"] for step, m in run.read_metrics().items()} == {1: 3.0, 2: 2.5, 3: 1.0}


def test_events_have_a_time_and_can_be_chosen_by_kind(tmp_path):
    run = make_run(tmp_path)
    run.record_event("submitted", job_key="7")
    run.record_event("resumed", step=3)
    (event,) = run.read_events("resumed")
    assert event["step"] == 3
    assert event["time"] > 1.7e9
    assert [e["event"] for e in run.read_events()] == ["submitted", "resumed"]


def test_every_file_that_a_run_leaves_is_text_that_a_person_can_read(tmp_path):
    run = make_run(tmp_path)
    run.record_event("résumé")
    assert "résumé" in run.events.read_text()
    assert json.loads(run.plan.read_text())["layout"] == {"tp": 1, "pp": 1, "dp": 1}
    assert "hidden_size: 64" in run.config.read_text()
    assert RunDir(run.path).name == run.name
