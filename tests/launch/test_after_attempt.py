from __future__ import annotations

from typing import Any

import pytest

from slurm_pt.launch.after_attempt import (
    FINISHED,
    USER_ERROR,
    WANTS_REQUEUE,
    Decision,
    ExitRecord,
    Outcome,
    PastAttempt,
    decide,
    describe_failure,
    failures_in_a_row,
)
from slurm_pt.launch.preemption import StopCause

UNKNOWN, PREEMPTED = StopCause.unknown, StopCause.preempted
TIMED_OUT, CANCELLED = StopCause.timed_out, StopCause.cancelled


def record(rank: int, code: int, reason: str = "", time: float = 1.0, **more: Any) -> ExitRecord:
    return ExitRecord(rank, f"n{rank // 2 + 1}", code, reason or f"code {code}", time, **more)


def ranks(*codes: int) -> list[ExitRecord]:
    return [record(rank, code) for rank, code in enumerate(codes)]


def past(outcome: str, first: int = 0, last: int = 0) -> PastAttempt:
    return PastAttempt(Outcome(outcome), first, last)


def verdict(**changes: Any) -> Decision:
    situation: dict[str, Any] = {
        "records": ranks(1, 1),
        "world_size": 2,
        "srun_code": 1,
        "srun_said": "",
        "cause": UNKNOWN,
        "progress": (0, 0),
        "history": [],
        "max_failures": 3,
    }
    return decide(**situation | changes)


@pytest.mark.parametrize(
    ("situation", "action", "outcome", "reason", "exit_code"),
    [
        pytest.param(
            {"records": ranks(0, 0), "srun_code": 0}, "none", "finished", "finished", 0, id="done"
        ),
        pytest.param(
            {"records": ranks(0, 0), "srun_code": 143},
            "none", "finished", "finished", 0,
            id="all ranks finished, then srun stumbled (F63)",
        ),
        pytest.param(
            {"records": ranks(0, 0), "srun_code": 75, "cause": PREEMPTED},
            "none", "finished", "finished", 0,
            id="finished in the grace of a preemption",
        ),
        pytest.param(
            {"records": [], "srun_code": 0},
            "requeue", "failed", "no rank left a record; srun ended with 0", 1,
            id="success in words only (F75)",
        ),
        pytest.param(
            {"records": ranks(0), "srun_code": 0},
            "requeue", "failed", "rank 1 left no record", 1,
            id="one rank did not say that it finished (F75)",
        ),
        pytest.param(
            {"records": [record(0, 75), record(1, 2, "slurm.mem is wrong")], "srun_code": 2},
            "stop", "user error", "slurm.mem is wrong", USER_ERROR,
            id="the user's mistake",
        ),
        pytest.param(
            {"records": [record(0, 2, "later", 9), record(1, 2, "first", 3)], "cause": PREEMPTED},
            "stop", "user error", "first", USER_ERROR,
            id="the first of two mistakes, even in a preemption",
        ),
        pytest.param(
            {"records": ranks(75, 75), "cause": PREEMPTED, "progress": (10, 20)},
            "requeue", "preempted", "preempted; step 20 is committed", WANTS_REQUEUE,
            id="preempted",
        ),
        pytest.param(
            {"records": ranks(75, 75), "cause": PREEMPTED},
            "requeue", "preempted", "preempted; nothing was committed yet", WANTS_REQUEUE,
            id="preempted in start-up",
        ),
        pytest.param(
            {"records": [], "srun_code": 137, "cause": PREEMPTED, "progress": (20, 20)},
            "requeue", "preempted", "preempted; step 20 is committed", WANTS_REQUEUE,
            id="preempted without grace",
        ),
        pytest.param(
            {"records": [record(0, 75, cause="preempted"), record(1, 75)], "progress": (1, 2)},
            "requeue", "preempted", "step 2", WANTS_REQUEUE,
            id="Slurm is silent now, but told rank 0",
        ),
        pytest.param(
            {"records": [record(0, 75, cause="timed out")], "cause": PREEMPTED},
            "requeue", "preempted", "preempted", WANTS_REQUEUE,
            id="what Slurm says at the end counts more",
        ),
        pytest.param(
            {"records": ranks(75, 75), "cause": TIMED_OUT, "progress": (10, 20)},
            "requeue", "timed out", "timed out; step 20 is committed", WANTS_REQUEUE,
            id="timed out",
        ),
        pytest.param(
            {"records": ranks(75, 75), "cause": TIMED_OUT, "progress": (20, 20)},
            "requeue", "timed out", "before a new step was committed", WANTS_REQUEUE,
            id="timed out without a step, once",
        ),
        pytest.param(
            {"cause": TIMED_OUT, "history": [past("timed out"), past("timed out")]},
            "stop", "timed out", "Given up: 3 attempts in a row", WANTS_REQUEUE,
            id="timed out without a step, for the third time",
        ),
        pytest.param(
            {"records": ranks(75, 75), "cause": CANCELLED, "progress": (10, 20)},
            "stop", "cancelled", "cancelled by the user", WANTS_REQUEUE,
            id="cancelled, saved, and never requeued (F39)",
        ),
        pytest.param(
            {"records": [], "srun_code": 143, "cause": CANCELLED},
            "stop", "cancelled", "cancelled by the user", WANTS_REQUEUE,
            id="cancelled before any rank was up (F39)",
        ),
        pytest.param(
            {"records": [record(0, 75, cause="cancelled"), record(1, 1)], "progress": (1, 2)},
            "stop", "cancelled", "cancelled by the user", WANTS_REQUEUE,
            id="cancelled, as rank 0 was told (F39)",
        ),
        pytest.param(
            {"records": ranks(75, 75), "srun_code": 75, "progress": (10, 20)},
            "requeue", "stopped", "stopped by a signal; step 20 is committed", WANTS_REQUEUE,
            id="somebody's signal, saved",
        ),
        pytest.param(
            {"records": ranks(75, 75), "srun_code": 75},
            "requeue", "failed", "all ranks left on request, but srun ended with 75", 75,
            id="somebody's signal, nothing saved",
        ),
        pytest.param(
            {"records": ranks(7, 1), "srun_code": 7},
            "requeue", "failed", "rank 0 on n1 failed first: code 7. Trying again from step 0", 1,
            id="a crash",
        ),
        pytest.param(
            {"records": [], "srun_said": "srun: error: Unable to satisfy cpu bind request\n"},
            "requeue", "failed",
            "no rank left a record; srun ended with 1 (srun: error: Unable to satisfy cpu bind", 1,
            id="srun failed before any rank (F20)",
        ),
    ],
)  # fmt: skip
def test_what_follows_an_attempt(situation, action, outcome, reason, exit_code):
    decision = verdict(**situation)
    assert (decision.action, decision.outcome) == (action, Outcome(outcome))
    assert reason in decision.reason
    assert decision.exit_code == exit_code


def test_five_preemptions_then_a_crash_are_one_failure_f29():
    decision = verdict(history=[past("preempted")] * 5)
    assert decision.action == "requeue"


def test_any_number_of_preemptions_never_counts_f29():
    history = [past("failed"), past("failed"), *[past("preempted")] * 20]
    decision = verdict(records=ranks(75, 75), cause=PREEMPTED, history=history)
    assert decision.action == "requeue"


def test_three_crashes_before_the_first_step_stop_the_chain_f29():
    history: list[PastAttempt] = []
    actions = []
    for _ in range(3):
        decision = verdict(history=history)
        actions.append(decision.action)
        history.append(past("failed"))
    assert actions == ["requeue", "requeue", "stop"]
    assert decision.reason.endswith(
        "Given up: 3 attempts in a row without a new committed step (slurm.max_failures=3)"
    )
    assert decision.exit_code == 1


@pytest.mark.parametrize(
    ("progress", "history", "in_a_row"),
    [
        pytest.param((0, 0), [], 1, id="the first"),
        pytest.param((0, 0), [past("failed"), past("failed")], 3, id="three"),
        pytest.param((0, 5), [past("failed"), past("failed")], 0, id="this one made progress"),
        pytest.param(
            (5, 5), [past("failed"), past("failed", 0, 5)], 1, id="the one before made progress"
        ),
        pytest.param(
            (5, 5), [past("failed"), past("preempted", 0, 5), past("failed", 5, 5)], 2,
            id="a preemption with progress wipes the slate",
        ),
        pytest.param(
            (5, 5), [past("failed", 5, 5), past("preempted", 5, 5), past("failed", 5, 5)], 3,
            id="a preemption without does not",
        ),
        pytest.param(
            (5, 5), [past("failed"), past("failed")], 1,
            id="an attempt without a record made progress in between",
        ),
        pytest.param((0, 0), [past("stopped"), past("timed out")], 3, id="all that led to nothing"),
        pytest.param((0, 0), [past("cancelled"), past("user error")], 1, id="a person ended them"),
    ],
)  # fmt: skip
def test_failures_count_from_the_last_committed_step_f29(progress, history, in_a_row):
    assert failures_in_a_row(progress, history) == in_a_row


@pytest.mark.parametrize(
    ("max_failures", "progress", "action"),
    [(0, (0, 0), "stop"), (0, (0, 5), "stop"), (1, (0, 0), "stop"), (1, (0, 5), "requeue")],
)
def test_the_budget_can_be_none_at_all(max_failures, progress, action):
    assert verdict(max_failures=max_failures, progress=progress).action == action


# What srun of 22.05.8 printed with --kill-on-bad-exit=1 when task 2 of 4 was the first to end.
SRUN_EXIT_7 = """\
srun: error: n2: task 2: Exited with exit code 7
srun: launch/slurm: _step_signal: Terminating StepId=163.0
slurmstepd-n2: error: *** STEP 163.0 ON n2 CANCELLED AT 2026-11-30T15:02:50 ***
srun: error: n2: tasks 0-1: Killed
srun: error: n3: task 3: Killed
srun: Force Terminated StepId=163.0
"""
SRUN_KILLED = """\
srun: error: n2: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=163.1
srun: error: n3: task 3: Exited with exit code 1
srun: error: n2: tasks 0-1: Exited with exit code 1
"""


@pytest.mark.parametrize(
    ("records", "srun_said", "words"),
    [
        pytest.param(
            [record(2, 7, "ValueError: x", 5, step=4)], SRUN_EXIT_7,
            "rank 2 on n2 failed first at step 4: ValueError: x",
            id="one failed, the others were killed for it",
        ),
        pytest.param(
            [record(0, 1, "connection reset"), record(1, 1), record(3, 1)], SRUN_KILLED,
            "rank 2 left no record, so it was killed (srun: error: n2: task 2: Killed)",
            id="one was killed, the others failed for it",
        ),
        pytest.param(
            [record(0, 1, "reset", 5.2), record(1, 1, "cause", 5.1)], "",
            "rank 1 on n1 failed first: cause",
            id="srun is silent: the earliest record",
        ),
        pytest.param(
            ranks(75, 75), "", "rank 2, 3 left no record, so it was killed",
            id="srun is silent and nobody failed",
        ),
        pytest.param(
            [record(0, 75), record(1, 75), record(2, 75), record(3, 7, "real")],
            "srun: error: n1: tasks 0-2: Exited with exit code 75\n"
            "srun: error: n2: task 3: Exited with exit code 7\n",
            "rank 3 on n2 failed first: real",
            id="who left on request is not to blame",
        ),
        pytest.param(
            [], "srun: fatal: cannot start\nmore",
            "srun ended with 137 (srun: fatal: cannot start)",
            id="nobody was up",
        ),
    ],
)  # fmt: skip
def test_the_first_failure_is_named_with_rank_host_and_reason_f61(records, srun_said, words):
    assert words in describe_failure(records, 4, 137, srun_said)


def test_a_decision_as_it_goes_on_record():
    assert verdict(records=ranks(0, 0)).as_json() == {
        "action": "none",
        "outcome": "finished",
        "reason": "finished",
        "exit_code": FINISHED,
    }


def test_f61_a_killed_rank_is_the_cause_although_srun_names_first_one_that_lost_it():
    lost = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer."
    records = [ExitRecord(rank, f"n{rank // 2 + 1}", 1, lost, 10.0 + rank, 4) for rank in range(3)]
    srun = (
        "srun: error: n2: task 2: Exited with exit code 1\n"
        "srun: error: n2: task 3: Killed\n"
        "srun: error: n1: tasks 0-1: Exited with exit code 1\n"
    )
    assert describe_failure(records, 4, 137, srun) == (
        "rank 3 left no record, so it was killed (srun: error: n2: task 3: Killed)"
    )
    # With a rank that failed by itself, that one is the cause, and the killed one its victim.
    own = [ExitRecord(1, "n1", 1, "ValueError: bad", 9.0, 4), *records[2:]]
    said = "srun: error: n1: task 1: Exited with exit code 1\n" + srun
    assert (
        describe_failure(own, 4, 137, said)
        == "rank 1 on n1 failed first at step 4: ValueError: bad"
    )
    # Nobody was killed and all lost somebody: the earliest is the best that can be said.
    assert "rank 0 on n1 failed first" in describe_failure(records, 3, 1, "")
