from __future__ import annotations

import time

from slurm_pt.files import append_json_line
from slurm_pt.monitor.history import first_difference, read_history
from slurm_pt.run_dir import RunDir
from tests.builders import make_run, write_end


def steps(run: RunDir, attempt: int, first: int, last: int, loss: float = 1.0) -> None:
    for step in range(first, last + 1):
        record = {"step": step, "loss": loss / step, "grad_norm": 0.1, "attempt": attempt}
        append_json_line(run.metrics, record)


def attempts(run: RunDir, *outcomes: str) -> None:
    for number, outcome in enumerate(outcomes):
        attempt = run.new_attempt()
        write_end(attempt, outcome=outcome, action="requeue", time=time.time())
        run.record_event("attempt_ended", attempt=number, outcome=outcome)


def test_a_run_that_went_straight_through_lost_nothing(tmp_path):
    run = make_run(tmp_path)
    attempts(run, "finished")
    steps(run, 0, 1, 10)
    history = read_history(run)
    assert (history.attempts, history.outcomes, history.steps_lost) == (1, ("finished",), 0)


def test_steps_between_the_checkpoint_and_the_stop_are_lost(tmp_path):
    run = make_run(tmp_path)
    attempts(run, "preempted", "failed", "finished")
    steps(run, 0, 1, 10)  # saved at 10: nothing lost
    run.record_event("resumed", attempt=1, step=10)
    steps(run, 1, 11, 17)  # crashed at 17, saved at 14: three lost
    run.record_event("resumed", attempt=2, step=14)
    steps(run, 2, 15, 20)
    history = read_history(run)
    assert history.steps_lost == 3
    assert history.outcomes == ("preempted", "failed", "finished")


def test_an_attempt_that_made_no_step_loses_none_twice(tmp_path):
    run = make_run(tmp_path)
    attempts(run, "failed", "failed", "finished")
    steps(run, 0, 1, 10)
    run.record_event("resumed", attempt=1, step=8)  # two lost, then killed in start-up
    run.record_event("resumed", attempt=2, step=8)
    steps(run, 2, 9, 12)
    assert read_history(run).steps_lost == 2


def test_a_start_afresh_after_a_crash_lost_everything(tmp_path):
    run = make_run(tmp_path)
    attempts(run, "failed", "finished")
    steps(run, 0, 1, 4)
    steps(run, 1, 1, 10)
    assert read_history(run).steps_lost == 4


def test_the_time_from_the_signal_to_the_commit_is_told(tmp_path):
    run = make_run(tmp_path)
    run.record_event("checkpoint_committed", step=5)
    run.record_event("checkpoint_committed", step=8, since_signal_s=1.5)
    assert read_history(run).signal_to_commit_s == (1.5,)


def test_a_requeue_that_was_refused_is_no_second_attempt_f32(tmp_path):
    run = make_run(tmp_path)
    attempts(run, "preempted")
    run.record_event("requeue_refused", attempt=0, reason="disabled")
    assert read_history(run).outcomes == ("preempted",)


def test_equal_runs_differ_nowhere_and_others_at_their_first_step(tmp_path):
    one, same, other = (make_run(tmp_path / name) for name in ("one", "same", "other"))
    steps(one, 0, 1, 5)
    steps(same, 0, 1, 3)
    steps(same, 1, 3, 5)
    steps(other, 0, 1, 2)
    steps(other, 0, 3, 5, loss=1.0000000000000002)
    assert first_difference(one, same) is None
    assert (first_difference(one, other) or "").startswith("step 3: ")


def test_a_missing_step_is_a_difference_and_an_empty_run_proves_nothing(tmp_path):
    one, short, empty = (make_run(tmp_path / name) for name in ("one", "short", "empty"))
    steps(one, 0, 1, 5)
    steps(short, 0, 1, 4)
    assert (first_difference(one, short) or "").startswith("step 5: ")
    assert "holds no step" in (first_difference(empty, one) or "")
