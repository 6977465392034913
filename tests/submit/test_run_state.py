from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from slurm_pt.files import write_json
from slurm_pt.owner import HEARTBEAT_GRACE_S, pid_start_time
from slurm_pt.run_dir import RunDir
from slurm_pt.submit.run_state import SETTLING_S, RunPhase, last_decision, run_state
from slurm_pt.submit.slurm import JobView
from tests.builders import make_run, seen_as, write_end

LONG_AGO = time.time() - SETTLING_S - 60


def submitted_run(tmp_path, *, at: float = LONG_AGO) -> RunDir:
    run = make_run(tmp_path)
    write_json(run.job, {"job_key": "7", "submitted": at, "folder": "/sweeps/1"})
    return run


def beat(run: RunDir, age_s: float) -> None:
    path = run.heartbeats / "rank_00000.json"
    path.write_text("{}")
    os.utime(path, (time.time() - age_s,) * 2)


@pytest.mark.parametrize(
    ("state", "phase", "reason"),
    [
        ("PENDING", RunPhase.waiting, "None"),
        ("CONFIGURING", RunPhase.waiting, "None"),
        ("REQUEUED", RunPhase.waiting, "None"),
        ("REQUEUE_FED", RunPhase.waiting, "None"),
        ("RESV_DEL_HOLD", RunPhase.held, "None"),
        ("REQUEUE_HOLD", RunPhase.held, "None"),
        ("SPECIAL_EXIT", RunPhase.held, "None"),
        ("SUSPENDED", RunPhase.held, "None"),
        ("STOPPED", RunPhase.held, "None"),
        ("RUNNING", RunPhase.running, "None"),
        ("RESIZING", RunPhase.running, "None"),
        ("SIGNALING", RunPhase.running, "None"),
        ("STAGE_OUT", RunPhase.running, "None"),
        ("COMPLETING", RunPhase.running, "None"),  # not an end yet (F78)
        ("COMPLETED", RunPhase.failed, "Slurm says COMPLETED, but the run left no done.json"),
        ("BOOT_FAIL", RunPhase.failed, "Slurm says BOOT_FAIL"),
        ("CANCELLED", RunPhase.cancelled, "cancelled"),
        ("DEADLINE", RunPhase.failed, "Slurm says DEADLINE"),
        ("FAILED", RunPhase.failed, "Slurm says FAILED"),
        ("LAUNCH_FAILED", RunPhase.failed, "Slurm says LAUNCH_FAILED"),
        ("NODE_FAIL", RunPhase.failed, "Slurm says NODE_FAIL"),
        ("OUT_OF_MEMORY", RunPhase.failed, "Slurm says OUT_OF_MEMORY"),
        ("PREEMPTED", RunPhase.failed, "Slurm says PREEMPTED"),
        ("RECONFIG_FAIL", RunPhase.failed, "Slurm says RECONFIG_FAIL"),
        ("REVOKED", RunPhase.failed, "Slurm says REVOKED"),
        ("TIMEOUT", RunPhase.failed, "Slurm says TIMEOUT"),
        ("NEWSTATE", RunPhase.unknown, "Slurm says NEWSTATE"),
    ],
)
def test_every_state_of_a_job_gives_a_state_of_its_run_f79(tmp_path, state, phase, reason):
    found = run_state(submitted_run(tmp_path), seen_as(state))
    assert (found.phase, found.reason) == (phase, reason)
    assert (found.job_key, found.slurm_state) == ("7", state)


def test_a_failed_launch_is_shown_with_slurms_reason_while_it_is_held(tmp_path):
    jobs = seen_as("PENDING", reason="launch failed requeued held")
    found = run_state(submitted_run(tmp_path), jobs)
    assert (found.phase, found.reason) == (RunPhase.held, "launch failed requeued held")


@pytest.mark.parametrize("jobs", [None, {}, seen_as("COMPLETED"), seen_as("FAILED")])
def test_a_run_with_a_done_record_is_finished_whatever_slurm_says(tmp_path, jobs):
    run = submitted_run(tmp_path)
    write_json(run.done, {"step": 10})
    assert run_state(run, jobs).phase is RunPhase.finished


def test_no_answer_is_unknown_and_never_an_end_f80(tmp_path):
    found = run_state(submitted_run(tmp_path), None)
    assert (found.phase, found.reason) == (RunPhase.unknown, "no answer from Slurm")
    assert found.phase.is_alive
    assert not found.phase.is_final


def test_without_an_answer_the_runs_own_record_of_its_end_counts_f77(tmp_path):
    run = submitted_run(tmp_path)
    write_end(run.new_attempt(), outcome="failed", action="stop", time=time.time())
    found = run_state(run, None)
    assert (found.phase, found.reason) == (RunPhase.failed, "it failed")


@pytest.mark.parametrize("jobs", [{}, seen_as("COMPLETED"), seen_as("NEWSTATE")])
def test_a_job_that_was_just_submitted_or_just_ended_may_settle_f78(tmp_path, jobs):
    run = submitted_run(tmp_path, at=time.time() - 5)
    assert run_state(run, jobs).phase is RunPhase.unknown


def test_what_slurm_says_has_failed_needs_no_time_to_settle(tmp_path):
    run = submitted_run(tmp_path, at=time.time())
    assert run_state(run, seen_as("FAILED")).phase is RunPhase.failed


def test_a_job_cancelled_before_it_started_is_cancelled_without_any_log_f79(tmp_path):
    run = submitted_run(tmp_path, at=time.time())
    assert run_state(run, seen_as("CANCELLED")).phase is RunPhase.cancelled


def test_a_purged_job_without_a_record_has_failed(tmp_path):
    found = run_state(submitted_run(tmp_path), {})
    assert found.phase is RunPhase.failed
    assert found.reason == "Slurm no longer lists the job, and it left no record"


@pytest.mark.parametrize(
    ("outcome", "phase"),
    [
        ("failed", RunPhase.failed),
        ("user error", RunPhase.failed),
        ("cancelled", RunPhase.cancelled),
    ],
)
def test_a_purged_job_ended_as_its_record_says(tmp_path, outcome, phase):
    run = submitted_run(tmp_path)
    write_end(run.new_attempt(), outcome="preempted", action="requeue", time=LONG_AGO + 1)
    write_end(run.new_attempt(), outcome=outcome, action="stop", time=LONG_AGO + 2)
    found = run_state(run, {})
    assert (found.phase, found.reason) == (phase, f"it {outcome}")
    assert last_decision(run)["outcome"] == outcome


def test_a_record_from_before_this_submission_says_nothing_about_it(tmp_path):
    run = submitted_run(tmp_path, at=time.time())
    write_end(run.new_attempt(), outcome="failed", action="stop", time=time.time() - 100)
    assert run_state(run, {}).phase is RunPhase.unknown
    assert run_state(run, seen_as("PENDING")).phase is RunPhase.waiting


def test_an_array_task_is_not_taken_for_its_sibling(tmp_path):
    run = make_run(tmp_path)
    write_json(run.job, {"job_key": "7_1", "submitted": LONG_AGO, "folder": "/"})
    jobs = {
        "7_0": JobView("7_0", "7", "FAILED"),
        "7_1": JobView("7_1", "8", "RUNNING"),
        "7_10": JobView("7_10", "9", "PENDING"),
    }
    assert run_state(run, jobs).phase is RunPhase.running


# ---------------------------------------------------------------------- runs without a Slurm job


def test_a_run_that_was_only_prepared_is_not_submitted(tmp_path):
    found = run_state(make_run(tmp_path), {})
    assert found.phase is RunPhase.not_submitted
    assert not found.phase.is_alive


def test_a_run_started_by_hand_lives_by_its_heartbeats(tmp_path):
    run = make_run(tmp_path)
    attempt = run.new_attempt()
    beat(run, 5)
    assert run_state(run, {}).phase is RunPhase.running
    beat(run, HEARTBEAT_GRACE_S + 5)
    found = run_state(run, {})
    assert (found.phase, found.reason) == (
        RunPhase.failed,
        "ended without a word; the same command goes on with it",
    )
    beat(run, 5)
    write_end(attempt, outcome="failed", action="stop", time=time.time())
    assert run_state(run, {}).phase is RunPhase.failed


def local_run(tmp_path, **changes) -> RunDir:
    run = make_run(tmp_path)
    pid = os.getpid()
    record = {"pid": pid, "pid_start": pid_start_time(pid), "submitted": time.time() - 5}
    host = os.uname().nodename
    write_json(run.job, {**record, "host": host, "folder": "/sweeps/1", **changes})
    return run


def test_a_local_run_waits_until_its_turn_and_then_runs(tmp_path):
    run = local_run(tmp_path)
    assert run_state(run, {}).phase is RunPhase.waiting
    run.new_attempt()
    found = run_state(run, None)  # no Slurm is needed to know
    assert (found.phase, found.reason) == (RunPhase.running, "local processes")


def test_a_local_run_whose_launcher_is_gone_has_failed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    run = local_run(tmp_path, pid=ended.pid, pid_start="1")
    found = run_state(run, {})
    assert (found.phase, found.reason) == (RunPhase.failed, "the local launcher is gone")


def test_a_local_run_ends_as_its_record_says(tmp_path):
    run = local_run(tmp_path)
    write_end(run.new_attempt(), outcome="cancelled", action="stop", time=time.time())
    assert run_state(run, {}).phase is RunPhase.cancelled


def test_a_local_run_started_again_is_not_judged_by_its_last_end(tmp_path):
    run = local_run(tmp_path)
    write_end(run.new_attempt(), outcome="failed", action="stop", time=time.time() - 100)
    assert run_state(run, {}).phase is RunPhase.running


def test_a_local_run_of_another_machine_is_not_declared_dead(tmp_path):
    run = local_run(tmp_path, host="login2")
    run.new_attempt()
    found = run_state(run, {})
    assert (found.phase, found.reason) == (
        RunPhase.unknown,
        "ask on login2, where its processes are",
    )
    beat(run, 5)
    assert run_state(run, {}).phase is RunPhase.running
