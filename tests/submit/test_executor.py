from __future__ import annotations

import time

import pytest
from submitit.core.utils import FailedJobError

from slurm_pt.files import write_json
from slurm_pt.plan import make_plan
from slurm_pt.submit.executor import SlurmRunExecutor, train_run
from slurm_pt.submit.script import make_job_spec
from tests.builders import make_run, read_small, write_end
from tests.submit.fakes import RecordingClient


@pytest.fixture
def executor(tmp_path):
    config = read_small()
    spec = make_job_spec(config, make_plan(config))
    return SlurmRunExecutor(tmp_path / "sweep", spec=spec, client=RecordingClient())


def test_a_job_is_a_run_folder_and_nothing_is_pickled_f73(executor, tmp_path):
    run = make_run(tmp_path)
    job = executor.submit(train_run, run.path)
    assert job.job_id == "100"
    assert job.run_path == run.path
    assert not list(tmp_path.rglob("*.pkl"))


def test_another_function_is_refused(executor):
    with pytest.raises(TypeError, match=r"submit\(train_run, path\)"):
        executor.submit(print, "x")


def test_the_result_of_a_job_is_the_runs_done_record_f75(executor, tmp_path):
    run = make_run(tmp_path)
    job = executor.submit(train_run, run.path)
    assert not job.done()
    with pytest.raises(FailedJobError, match="it has not ended"):
        job.result()
    write_json(run.done, {"step": 10})
    assert job.done()
    assert job.result() == {"step": 10}


def test_a_job_that_will_run_again_has_not_ended_and_one_that_stopped_has_failed(
    executor, tmp_path
):
    run = make_run(tmp_path)
    job = executor.submit(train_run, run.path)
    write_end(run.new_attempt(), outcome="preempted", action="requeue", time=time.time())
    assert not job.done()
    write_end(run.new_attempt(), outcome="failed", action="stop", time=time.time())
    assert job.done()
    with pytest.raises(FailedJobError, match="it failed"):
        job.result()
