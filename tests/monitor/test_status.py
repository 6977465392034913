from __future__ import annotations

import time

import pytest

from slurm_pt.errors import RunFolderError
from slurm_pt.files import write_json
from slurm_pt.monitor.status import find_runs, read_status
from slurm_pt.submit.run_state import RunPhase
from tests.builders import make_run, seen_as


def running(tmp_path):
    run = make_run(tmp_path)
    write_json(run.job, {"job_key": "7", "submitted": 0.0, "folder": "/"})
    run.new_attempt()
    run.new_attempt()
    beat = {"time": time.time() - 3, "phase": "train", "step": 12, "steps": 100, "loss": 2.5}
    write_json(run.heartbeats / "rank_00000.json", {**beat, "tokens_per_s": 500.0})
    return run


def test_a_running_run_shows_what_its_heartbeat_says(tmp_path):
    status = read_status(running(tmp_path), seen_as("RUNNING"))
    assert status.state.phase is RunPhase.running
    assert (status.attempt, status.step, status.steps, status.loss) == (1, 12, 100, 2.5)
    assert (status.tokens_per_s, status.phase) == (500.0, "train")
    assert status.heartbeat_age_s is not None
    assert 2 < status.heartbeat_age_s < 60


def test_without_an_answer_the_figures_stay_and_the_state_is_unknown_f80(tmp_path):
    status = read_status(running(tmp_path), None)
    assert status.state.phase is RunPhase.unknown
    assert (status.step, status.tokens_per_s, status.phase) == (12, 500.0, "train")


def test_an_ended_run_keeps_its_step_and_has_no_speed(tmp_path):
    status = read_status(running(tmp_path), seen_as("FAILED"))
    assert (status.step, status.loss) == (12, 2.5)
    assert (status.tokens_per_s, status.phase, status.heartbeat_age_s) == (None, None, None)


def test_what_is_not_known_is_none_and_not_zero_f82(tmp_path):
    status = read_status(make_run(tmp_path), {})
    row = status.as_json()
    assert row["state"] == "not submitted"
    unknown = ("attempt", "step", "steps", "loss", "tokens_per_s", "phase", "heartbeat_age_s")
    assert {row[name] for name in unknown} == {None}


def test_a_damaged_heartbeat_does_not_hide_the_state(tmp_path):
    run = running(tmp_path)
    (run.heartbeats / "rank_00000.json").write_text('{"step": 1')
    status = read_status(run, seen_as("RUNNING"))
    assert (status.state.phase, status.step) == (RunPhase.running, None)


def test_runs_are_found_by_their_folder_their_root_and_their_sweep(tmp_path):
    a, b = (make_run(tmp_path, train__seed=seed) for seed in (1, 2))
    sweep = tmp_path / "sweeps" / "1"
    for group, run in (("group_0", b), ("group_1", a)):
        (sweep / group).mkdir(parents=True)
        (sweep / group / "runs.txt").write_text(f"{run.path}\n")
    single = tmp_path / "sweeps" / "2"
    single.mkdir()
    (single / "runs.txt").write_text(f"{b.path}\n{a.path}\n")
    in_name_order = sorted([a, b], key=lambda run: run.name)
    assert find_runs([a.path]) == [a]
    assert find_runs([tmp_path]) == in_name_order
    assert find_runs([sweep]) == [b, a]
    assert find_runs([single]) == [b, a]
    assert find_runs([b.path, tmp_path]) == [b, a]  # each once


def test_a_place_that_is_not_there_is_told(tmp_path):
    with pytest.raises(RunFolderError, match=r"no such folder\. Name a run, a sweep's folder"):
        find_runs([tmp_path / "nowhere"])
