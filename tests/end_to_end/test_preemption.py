"""Preempted, killed, cancelled, out of time: what is left, and that it is exactly right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from slurm_pt.devcluster import DevCluster
from slurm_pt.files import read_json
from slurm_pt.run_dir import RunDir
from tests.end_to_end.on_slurm import (
    SMALL,
    User,
    assert_same_losses,
    history,
    kill_rank,
    tell,
)

pytestmark = [pytest.mark.slurm, pytest.mark.ranks]

SPLIT = ("parallel.tp=2", "parallel.pp=2", "slurm.nodes=2", "slurm.qos=low")


@pytest.fixture
def user(tmp_path: Path, devcluster: DevCluster, corpora: Path) -> User:
    return User(tmp_path, devcluster, corpora=corpora)


def undisturbed(user: User, *overrides: str, up_to: int | None = None) -> RunDir:
    """The same run on local processes, never stopped before its end, or before step `up_to`."""
    alone = user.without_slurm()
    (run,) = alone.submits(*SMALL, *overrides)
    if up_to is None:
        alone.waits_for_end(run)
    else:
        alone.waits_for_step(run, up_to)
        alone.types("slurm-pt", "cancel", str(run.path))
        alone.waits_for(run.attempt(0).end.exists, "end", [run])
    return run


def test_f29_ten_preemptions_at_random_steps_lose_no_step_and_change_no_bit(user: User) -> None:
    # More steps than any machine makes in this time: how many are made is not the test's business.
    training = ("train.steps=1000000", "model.dropout=0.1", *SPLIT)
    (run,) = user.submits(*SMALL, *training)
    step, chance = 0, random.Random(5)
    for attempt in range(10):
        user.waits_for_step(run, step + chance.randint(1, 15), attempt=attempt)
        user.takes_nodes(nodes=4, seconds=0.2)
        end = run.attempt(attempt).end
        user.waits_for(end.exists, f"end of attempt {attempt}", [run])
        assert read_json(end)["outcome"] == "preempted", tell(run)
        step = read_json(end)["last_step"]
    user.waits_for_step(run, step + 20, attempt=10)
    user.types("slurm-pt", "cancel", str(run.path))
    user.waits_for(run.attempt(10).end.exists, "end of the last attempt", [run])
    past = history(run)
    assert past.outcomes == ("preempted",) * 10 + ("cancelled",)
    assert past.steps_lost == 0
    assert len(past.signal_to_commit_s) == 11
    last = read_json(run.attempt(10).end)["last_step"]
    reference = undisturbed(user, *training, up_to=last)
    assert_same_losses(run, reference, up_to=last)
    print(f"10 preemptions, {last} steps, seconds to commit: {past.signal_to_commit_s}")


def test_f61_a_killed_rank_is_named_and_the_run_resumes_from_its_last_periodic_save(
    user: User,
) -> None:
    training = ("train.steps=120", *SPLIT)
    (run,) = user.submits(*SMALL, *training, "checkpoint.interval_s=1")
    user.waits_for(lambda: run.committed_step() > 0, "periodic save", [run])
    kill_rank(run, 3)
    end = run.attempt(0).end
    user.waits_for(end.exists, "end of the first attempt", [run])
    decision = read_json(end)
    assert decision["outcome"] == "failed"
    assert decision["action"] == "requeue"
    assert "rank 3 left no record" in decision["reason"]
    user.waits_for_end(run)
    (resumed,) = run.read_events("resumed")
    assert resumed["step"] >= decision["last_step"] > 0
    assert_same_losses(run, undisturbed(user, *training))


def test_f39_a_cancelled_run_leaves_a_checkpoint_and_is_not_requeued(user: User) -> None:
    (run,) = user.submits(*SMALL, "train.steps=100000", *SPLIT)
    user.waits_for_step(run, 3)
    answer = user.types("slurm-pt", "cancel", str(run.path))
    assert answer.code == 0, answer.text
    user.waits_for(run.attempt(0).end.exists, "end", [run])
    decision = read_json(run.attempt(0).end)
    assert (decision["outcome"], decision["action"]) == ("cancelled", "stop"), tell(run)
    assert decision["last_step"] >= 3
    user.waits_for(lambda: user.status()[0]["state"] == "cancelled", "state cancelled", [run])
    job = read_json(run.job)["job_key"]
    assert user.types("squeue", "-h", "-t", "pending,running", "-j", job).out == ""


def test_f28_a_run_that_reaches_its_time_limit_saves_and_goes_on_in_the_next_attempt(
    user: User,
) -> None:
    # Slurm sends the signal up to 60 s early, so with a lead of 100 s of 120 s it comes at once.
    training = ("train.steps=150", *SPLIT)
    limit = ("slurm.time='2'", "slurm.signal_lead_s=100")
    (run,) = user.submits(*SMALL, *training, *limit)
    end = run.attempt(0).end
    user.waits_for(end.exists, "end of the first attempt", [run])
    if read_json(end)["outcome"] == "finished":
        pytest.fail(f"the run was over before its time limit was near\n{tell(run)}")
    assert read_json(end)["outcome"] == "timed out", tell(run)
    assert read_json(end)["action"] == "requeue"
    user.types("slurm-pt", "cancel", str(run.path))


def test_the_same_command_again_leaves_a_running_run_alone_and_resumes_a_cancelled_one(
    user: User,
) -> None:
    command = user.sweep(*SMALL, "train.steps=150", *SPLIT)
    assert user.types(*command).code == 0
    (run,) = [RunDir(path.parent) for path in user.root.glob("*/config.yaml")]
    user.waits_for_step(run, 2)
    again = user.types(*command)
    assert again.code == 0
    assert "running, left alone" in again.text
    user.types("slurm-pt", "cancel", str(run.path))
    user.waits_for(run.attempt(0).end.exists, "end", [run])
    user.waits_for(lambda: user.status()[0]["state"] == "cancelled", "state cancelled", [run])
    assert "1 of 1 runs submitted" in user.types(*command).text
    user.waits_for(lambda: len(run.list_attempts()) == 2, "second attempt", [run])
    user.waits_for(lambda: run.done.exists() or run.attempt(1).end.exists(), "end", [run])
    assert history(run).steps_lost == 0
    finished = user.types(*command)
    assert finished.code == 0
    assert "finished, left alone" in finished.text


def test_a_second_writer_of_a_running_run_is_refused_with_exit_code_2(user: User) -> None:
    (run,) = user.submits(*SMALL, "train.steps=100000", *SPLIT)
    user.waits_for_step(run, 2)
    script = next((user.root / "sweeps").glob("*/job.sbatch"))
    answer = user.types("sbatch", "--parsable", str(script))
    job = answer.out.strip()
    user.waits_for(
        lambda: user.types("squeue", "-h", "-j", job, "-o", "%T").out.strip() in {"", "FAILED"},
        "end of the second job",
        [run],
    )
    log = next((user.root / "sweeps").glob(f"*/slurm-{job}.out")).read_text()
    assert f"belongs to Slurm job {read_json(run.job)['job_key']}" in log
    assert "Traceback" not in log
    assert user.types("scontrol", "show", "job", job).out.count("ExitCode=2:0") == 1
    assert len(run.list_attempts()) == 1
    user.types("slurm-pt", "cancel", str(run.path))
