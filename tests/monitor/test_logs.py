from __future__ import annotations

import io
import threading
import time

import pytest

from slurm_pt.devcluster import wait_until
from slurm_pt.errors import RunFolderError
from slurm_pt.files import write_json
from slurm_pt.monitor import logs
from slurm_pt.monitor.logs import show_logs
from tests.builders import make_run, write_end


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def shown(run, *, rank: int | None = 0, attempt: int | None = None, follow: bool = False) -> str:
    out = io.StringIO()
    show_logs(run, rank=rank, attempt=attempt, follow=follow, out=out)
    return out.getvalue()


def test_a_rank_of_the_newest_attempt_is_shown(run):
    for number in range(2):
        run.new_attempt().rank_log(0).write_text(f"attempt {number}\n")
    assert shown(run) == "attempt 1\n"
    assert shown(run, attempt=0) == "attempt 0\n"


def test_all_ranks_are_shown_in_order_with_their_numbers_and_whole_lines(run):
    attempt = run.new_attempt()
    attempt.rank_log(10).write_text("ten\n")
    attempt.rank_log(2).write_text("two\nSegmentation fault")  # no line feed any more
    assert shown(run, rank=None) == "[2] two\n[2] Segmentation fault\n[10] ten\n"


def test_what_srun_said_and_what_was_decided_come_last_f20(run):
    attempt = run.new_attempt()
    attempt.rank_log(0).write_text("loss 1\n")
    attempt.srun_log.write_text("srun: error: n1: task 0: Killed\n")
    write_end(attempt, outcome="failed", action="stop", time=time.time())
    assert shown(run) == (
        "loss 1\n--- srun ---\nsrun: error: n1: task 0: Killed\n"
        "--- attempt 0 failed: it failed ---\n"
    )


def test_bytes_that_are_no_text_do_not_crash(run):
    run.new_attempt().rank_log(0).write_bytes(b"\xff ok\n")
    assert shown(run) == "� ok\n"


def test_following_goes_on_into_later_attempts_until_the_run_is_over(run, monkeypatch):
    monkeypatch.setattr(logs, "FOLLOW_S", 0.01)
    first = run.new_attempt()
    first.rank_log(0).write_text("one\n")
    out = io.StringIO()
    follower = threading.Thread(
        target=show_logs,
        args=(run,),
        kwargs={"rank": None, "attempt": None, "follow": True, "out": out},
    )
    follower.start()
    assert wait_until(lambda: "[0] one\n" in out.getvalue(), timeout_s=30)
    with first.rank_log(0).open("a") as log:
        log.write("half")
        log.flush()
        log.write(" a line\n")
    write_end(first, outcome="preempted", action="requeue", time=time.time())
    second = run.new_attempt()
    second.rank_log(0).write_text("two\n")
    assert wait_until(lambda: "[0] two\n" in out.getvalue(), timeout_s=30)
    assert follower.is_alive()
    write_json(run.done, {})
    follower.join(timeout=30)
    assert not follower.is_alive()
    assert out.getvalue() == (
        "[0] one\n[0] half a line\n--- attempt 0 preempted: it preempted ---\n"
        "--- attempt 1 ---\n[0] two\n"
    )


def test_an_attempt_that_is_not_there_is_told_with_those_that_are(run):
    run.new_attempt()
    with pytest.raises(RunFolderError, match=r"has no attempt 3\. There are: 0"):
        shown(run, attempt=3)


def test_a_run_that_has_not_started_says_why_and_where_to_look(run):
    with pytest.raises(RunFolderError, match=r"was never started\. .*slurm-pt submit --run"):
        shown(run)
    write_json(run.job, {"job_key": "7", "folder": "/sweeps/1", "submitted": 0.0})
    with pytest.raises(RunFolderError, match=r"job 7 has not started.*would be in /sweeps/1"):
        shown(run)
    write_json(run.job, {"pid": 7, "folder": "/sweeps/1", "submitted": 0.0})
    with pytest.raises(RunFolderError, match="its launcher has not started"):
        shown(run)
