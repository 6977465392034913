from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from slurm_pt.errors import RunFolderError, SlurmUnavailableError, SubmitError
from slurm_pt.files import read_json, write_json
from slurm_pt.launch import attempt as attempt_module
from slurm_pt.launch.after_attempt import ExitRecord, Outcome
from slurm_pt.launch.attempt import begin_attempt, conclude, end_attempt, read_exit_records
from slurm_pt.launch.preemption import StopCause
from slurm_pt.owner import read_owner
from slurm_pt.submit.run_state import RunPhase, run_state
from slurm_pt.submit.slurm import SlurmClient
from tests.builders import commit_step, make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path, parallel__dp=2, slurm__max_failures=2)


@pytest.fixture
def in_job(monkeypatch, tmp_path):
    """The environment of a job, on a node where no Slurm command can be found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return lambda count: monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))


def leave(attempt, rank: int, code: int, **more: Any) -> None:
    record = ExitRecord(rank, "n1", code, f"code {code}", 5.0, **more)
    write_json(attempt.exit_record(rank), dataclasses.asdict(record))


def end(attempt, *, srun_code: int = 1, cause: StopCause = StopCause.unknown):
    decision = end_attempt(attempt, srun_code=srun_code, cause=cause)
    conclude(attempt, decision)
    return decision


def test_beginning_takes_the_run_and_notes_where_it_stands(run, in_job):
    commit_step(run, 40)
    attempt = begin_attempt(run)
    assert attempt is not None
    begin = read_json(attempt.begin)
    assert (begin["first_step"], begin["nodes"]) == (40, "n[1-2]")
    owner = read_owner(run)
    assert owner is not None
    assert (owner.job_key, owner.nonce) == ("7", begin["owner"]["nonce"])
    assert run.read_events("attempt_began")[0]["job_key"] == "7"


def test_f31_a_missing_scontrol_is_told_when_the_job_starts(run, in_job, capsys):
    attempt_module.cli(["begin", str(run.path)], standalone_mode=False)
    said = capsys.readouterr()
    assert said.out.strip() == str(run.attempt(0).path)  # the batch script reads this line alone
    assert "scontrol is not on this node's PATH" in said.err
    (event,) = run.read_events("requeue_impossible")
    assert "slurm-pt submit --run" in event["reason"]


def test_a_finished_run_is_not_begun_again(run):
    write_json(run.done, {})
    assert begin_attempt(run) is None
    assert run.list_attempts() == []


def test_another_job_is_refused_while_the_run_is_owned(run, in_job, monkeypatch):
    begin_attempt(run)
    (run.heartbeats / "rank_00000.json").write_text("{}")
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # no Slurm to ask: the heartbeat decides
    with pytest.raises(RunFolderError, match="belongs to Slurm job 7"):
        begin_attempt(run)
    assert len(run.list_attempts()) == 1


def test_a_requeued_job_begins_anew_whatever_its_last_start_left_f37(run, in_job):
    begin_attempt(run)  # and is killed: no end, ownership not released
    (run.heartbeats / "rank_00000.json").write_text("{}")
    run.new_attempt()  # killed before it could note its begin
    in_job(1)
    attempt = begin_attempt(run)
    assert attempt is not None
    assert attempt.number == 2
    leave(attempt, 0, 0)
    leave(attempt, 1, 0)
    assert end(attempt, srun_code=0).action == "none"


def test_an_end_is_put_on_record_and_lets_the_next_writer_in(run, in_job, monkeypatch):
    attempt = begin_attempt(run)
    leave(attempt, 0, 75, step=20)
    leave(attempt, 1, 75, step=20)
    commit_step(run, 20)
    decision = end(attempt, srun_code=75, cause=StopCause.preempted)
    assert (decision.action, decision.outcome) == ("requeue", Outcome.preempted)
    record = read_json(attempt.end)
    assert (record["outcome"], record["first_step"], record["last_step"]) == ("preempted", 0, 20)
    assert run.read_events("attempt_ended")[0]["outcome"] == "preempted"
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert begin_attempt(run) is not None


def test_exit_records_come_in_rank_order(run, in_job):
    attempt = begin_attempt(run)
    for rank in (10, 2, 0):
        leave(attempt, rank, 0)
    assert [record.rank for record in read_exit_records(attempt)] == [0, 2, 10]


def test_failures_are_counted_over_attempts_and_preemptions_are_not_f29(run, in_job):
    actions = []
    for start in range(6):
        in_job(start)
        attempt = begin_attempt(run)
        assert attempt is not None
        crashed = start in {0, 5}
        leave(attempt, 0, 1 if crashed else 75)
        actions.append(
            end(attempt, cause=StopCause.unknown if crashed else StopCause.preempted).action
        )
    assert actions == ["requeue"] * 5 + ["stop"]  # the second crash without a step; the limit is 2


def test_what_srun_said_reaches_the_reason_f20(run, in_job):
    attempt = begin_attempt(run)
    attempt.srun_log.write_bytes(b"\xff\nsrun: error: Unable to satisfy cpu bind request\n")
    assert "(srun: error: Unable to satisfy cpu bind request)" in end(attempt).reason


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slurm_pt.launch.attempt", *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_commands_of_the_batch_script_without_scontrol_f31(run, in_job):
    begun = command("begin", str(run.path))
    assert begun.returncode == 0, begun.stderr
    (attempt,) = run.list_attempts()
    assert begun.stdout == f"{attempt.path}\n"
    leave(attempt, 0, 75)
    leave(attempt, 1, 75)
    commit_step(run, 5)
    ended = command("end", str(attempt.path), "--srun-code", "75")
    assert ended.returncode == 75
    assert "scontrol is not on PATH" in ended.stderr
    assert f"slurm-pt submit --run {run.path}" in ended.stderr
    # The next step never comes by itself, and the record says so.
    assert read_json(attempt.end)["action"] == "stop"
    assert [e["event"] for e in run.read_events()][-2:] == ["attempt_ended", "requeue_refused"]
    assert run_state(run, {}).phase is RunPhase.stopped


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    begun = command("begin", str(tmp_path / "nowhere"))
    assert begun.returncode == 2
    assert begun.stderr.startswith("slurm_pt: ")
    assert "is not a run folder" in begun.stderr
    assert "Traceback" not in begun.stderr


def test_a_finished_run_prints_nothing_and_exits_well(run):
    write_json(run.done, {})
    begun = command("begin", str(run.path))
    assert (begun.returncode, begun.stdout) == (0, "")


class SilentController(SlurmClient):
    """Gives no answer to the first `silences` requests for a requeue."""

    def __init__(self, silences: int) -> None:
        super().__init__({"PATH": ""})
        self.silences, self.asked = silences, 0

    def requeue(self, job_key: str) -> None:
        self.asked += 1
        if self.asked <= self.silences:
            raise SlurmUnavailableError("no answer")


def test_a_controller_that_is_away_is_asked_again_f80(monkeypatch):
    monkeypatch.setattr(attempt_module, "REQUEUE_PAUSES_S", (0, 0, 0))
    client = SilentController(silences=3)
    attempt_module._requeue(client, "7")
    assert client.asked == 4
    with pytest.raises(SlurmUnavailableError):
        attempt_module._requeue(SilentController(silences=4), "7")


def test_a_refusal_is_not_repeated_f32(monkeypatch):
    class Refusing(SilentController):
        def requeue(self, job_key: str) -> None:
            self.asked += 1
            raise SubmitError("presently disabled")

    client = Refusing(0)
    with pytest.raises(SubmitError, match="presently disabled"):
        attempt_module._requeue(client, "7")
    assert client.asked == 1


def test_the_pauses_between_requests_grow_and_last_minutes_f80():
    pauses = attempt_module.REQUEUE_PAUSES_S
    assert list(pauses) == sorted(pauses)
    assert sum(pauses) >= 300
