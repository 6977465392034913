from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from slurm_pt.files import write_json
from slurm_pt.owner import pid_start_time, this_process
from slurm_pt.submit.cancel import cancel_run
from tests.builders import make_run
from tests.submit.fakes import RecordingClient


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def test_a_finished_run_and_one_never_submitted_are_left_alone(run):
    client = RecordingClient()
    assert cancel_run(run, client) == "was never submitted"
    write_json(run.done, {})
    assert cancel_run(run, client) == "finished already"
    assert (client.cancelled, run.read_events()) == ([], [])


def test_a_job_is_cancelled_by_the_key_of_its_own_task(run):
    client = RecordingClient()
    write_json(run.job, {"job_key": "7_3"})
    assert cancel_run(run, client) == "cancelled job 7_3"
    assert client.cancelled == ["7_3"]
    assert [event["event"] for event in run.read_events()] == ["cancel_requested"]


def test_a_local_launcher_is_asked_to_stop(run):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        pid, host = launcher.pid, os.uname().nodename
        write_json(run.job, {"pid": pid, "pid_start": pid_start_time(pid), "host": host})
        assert cancel_run(run, RecordingClient()) == f"asked local launcher {pid} to stop"
        assert launcher.wait(timeout=30) == -signal.SIGTERM


def test_a_run_that_was_started_by_hand_is_asked_to_stop(run):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank_0:
        owner = this_process(job_key=None, restart_count=0, pid=rank_0.pid)
        write_json(run.owner, dataclasses.asdict(owner))
        assert cancel_run(run, RecordingClient()) == f"asked process {rank_0.pid} to stop"
        assert rank_0.wait(timeout=30) == -signal.SIGTERM
    assert cancel_run(run, RecordingClient()) == "is not running"
    write_json(run.owner, dataclasses.asdict(owner) | {"host": "login2"})
    assert "started by hand on login2: end it there" in cancel_run(run, RecordingClient())


def test_a_process_that_has_the_launchers_pid_now_is_left_alone(run):
    write_json(run.job, {"pid": os.getpid(), "pid_start": "1", "host": os.uname().nodename})
    assert cancel_run(run, RecordingClient()) == "its local launcher has ended already"


def test_a_launcher_on_another_machine_is_not_looked_for_here(run):
    record = {"pid": os.getpid(), "pid_start": pid_start_time(os.getpid()), "host": "login2"}
    write_json(run.job, record)
    assert (
        cancel_run(run, RecordingClient()) == "its local launcher runs on login2: cancel it there"
    )
