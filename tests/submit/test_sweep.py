from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_pt.errors import ConfigError, RunFolderError, SubmitError
from slurm_pt.files import find_json, read_json, write_json
from slurm_pt.monitor.status import find_runs
from slurm_pt.submit.run_state import RunPhase, run_state
from slurm_pt.submit.sweep import check_points, submit_points
from tests.builders import make_point, seen_as
from tests.submit.fakes import RecordingClient


def points_of(tmp_path, number: int, **asked):
    return [make_point(tmp_path, train__seed=seed, **asked) for seed in range(number)]


def test_one_point_is_one_plain_job(tmp_path):
    client = RecordingClient()
    (point,) = points_of(tmp_path, 1)
    submitted = submit_points([point], client=client, jobs={})
    assert submitted.new == (point.run,)
    assert submitted.folder is not None
    (script,) = client.scripts
    assert "--array" not in script
    job = read_json(point.run.job)
    assert (job["job_key"], job["folder"]) == ("100", str(submitted.folder))
    assert [event["event"] for event in point.run.read_events()] == ["submitted"]
    assert (submitted.folder / "job.sbatch").read_text() == script


def test_points_that_ask_for_the_same_are_one_array(tmp_path):
    client = RecordingClient()
    points = points_of(tmp_path, 3, slurm__array_parallelism=2)
    submitted = submit_points(points, client=client, jobs={})
    (script,) = client.scripts
    assert "#SBATCH --array=0-2%2\n" in script
    assert [read_json(p.run.job)["job_key"] for p in points] == ["100_0", "100_1", "100_2"]
    assert submitted.folder is not None
    manifest = (submitted.folder / "runs.txt").read_text()
    assert manifest.splitlines() == [str(p.run.path) for p in points]
    assert [run.path for run in find_runs([submitted.folder])] == [p.run.path for p in points]


def test_points_that_ask_for_something_else_are_tested_first_and_found_again(tmp_path):
    client = RecordingClient()
    points = [
        make_point(tmp_path, train__seed=0, slurm__mem="1G"),
        make_point(tmp_path, train__seed=1, slurm__mem="2G"),
        make_point(tmp_path, train__seed=2, slurm__mem="1G"),
    ]
    submitted = submit_points(points, client=client, jobs={})
    assert client.tested == client.scripts
    assert len(client.scripts) == 2
    assert [read_json(p.run.job)["job_key"] for p in points] == ["100_0", "200", "100_1"]
    assert submitted.folder is not None
    assert {run.path for run in find_runs([submitted.folder])} == {p.run.path for p in points}


def test_if_one_group_would_be_refused_none_is_submitted_f68_f70(tmp_path):
    client = RecordingClient(refuses=["--mem=2G"])
    points = [
        make_point(tmp_path, train__seed=0, slurm__mem="1G"),
        make_point(tmp_path, train__seed=1, slurm__mem="2G"),
    ]
    with pytest.raises(SubmitError, match="--mem=2G"):
        submit_points(points, client=client, jobs={})
    assert client.scripts == []
    assert all(find_json(p.run.job) is None for p in points)


def test_a_limit_reached_half_way_says_what_is_in_and_the_rest_can_follow_f70(tmp_path):
    points = [make_point(tmp_path, train__seed=n, slurm__mem=f"{n}G") for n in (1, 2)]
    with pytest.raises(SubmitError, match=r"QOSMaxSubmit.*\nSubmitted before that: 100$"):
        submit_points(points, client=RecordingClient(limit=1), jobs={})
    assert run_state(points[1].run, {}).phase is RunPhase.not_submitted
    again = submit_points(points, client=RecordingClient(), jobs=seen_as("RUNNING", "100"))
    assert again.new == (points[1].run,)
    assert [run for run, _ in again.already] == [points[0].run]


@pytest.mark.parametrize(
    ("prepare", "phase"),
    [
        (lambda run: write_json(run.done, {}), RunPhase.finished),
        (lambda run: write_json(run.job, {"job_key": "7", "submitted": 0.0}), RunPhase.running),
    ],
)
def test_the_same_command_again_leaves_finished_and_running_runs_alone(tmp_path, prepare, phase):
    point, other = points_of(tmp_path, 2)
    point.run.path.mkdir(parents=True)
    prepare(point.run)
    client = RecordingClient()
    submitted = submit_points([point, other], client=client, jobs=seen_as("RUNNING"))
    assert [(run, state.phase) for run, state in submitted.already] == [(point.run, phase)]
    assert submitted.new == (other.run,)


def test_if_slurm_is_silent_a_run_that_may_be_alive_is_left_alone_f80(tmp_path):
    (point,) = points_of(tmp_path, 1)
    point.run.path.mkdir(parents=True)
    write_json(point.run.job, {"job_key": "7", "submitted": 0.0})
    submitted = submit_points([point], client=RecordingClient(), jobs=None)
    assert submitted.folder is None
    assert submitted.already[0][1].phase is RunPhase.unknown
    assert not (tmp_path / "sweeps").exists()


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"])
def test_a_run_that_failed_is_submitted_again(tmp_path, state):
    (point,) = points_of(tmp_path, 1)
    submit_points([point], client=RecordingClient(), jobs={})
    again = submit_points([point], client=RecordingClient(), jobs=seen_as(state, "100"))
    assert again.new == (point.run,)


def test_two_points_that_are_one_run_are_refused(tmp_path):
    a, b = points_of(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"points 1 and 2 of the sweep are the same run"):
        check_points([b, a, a])


def test_sweeps_of_the_same_second_get_folders_of_their_own_f71(tmp_path):
    (point,) = points_of(tmp_path, 1)
    failed = seen_as("FAILED", "100")
    folders = {
        submit_points([point], client=RecordingClient(), jobs=failed).folder for _ in range(5)
    }
    assert len(folders) == 5
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}(-\d)?", Path(f).name) for f in folders if f)


def test_a_log_folder_that_cannot_be_made_is_told_before_anything_is_submitted_f100(tmp_path):
    (point,) = points_of(tmp_path, 1)
    (tmp_path / "sweeps").write_text("in the way")
    client = RecordingClient()
    with pytest.raises(RunFolderError, match=r"run_root=.*set another run_root"):
        submit_points([point], client=client, jobs={})
    assert client.scripts == []
