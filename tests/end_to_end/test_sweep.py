"""Sweeps as a user sees them: submitted, watched, detached from, and agreed upon with squeue."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from slurm_pt.devcluster import DevCluster
from slurm_pt.monitor.status import find_runs
from tests.end_to_end.on_slurm import REPOSITORY, SMALL, TRAIN, User, tell

pytestmark = [pytest.mark.slurm, pytest.mark.ranks]


@pytest.fixture
def user(tmp_path: Path, devcluster: DevCluster, corpora: Path) -> User:
    return User(tmp_path, devcluster, corpora=corpora)


def squeue_states(user: User) -> dict[str, str]:
    lines = user.types("squeue", "-h", "-r", "-t", "all", "-o", "%i %T").out.splitlines()
    return dict(line.split() for line in lines)


def test_status_agrees_with_squeue_about_every_trial_through_the_life_of_a_sweep(
    user: User,
) -> None:
    rates = ",".join(f"{number}e-4" for number in range(1, 21))
    runs = user.submits(*SMALL, f"train.lr={rates}", "train.steps=5", "slurm.array_parallelism=4")
    assert len(runs) == 20
    seen: set[str] = set()
    compared = 0
    while True:
        before, rows, after = squeue_states(user), user.status(), squeue_states(user)
        for row in rows:
            # A job may move on between two commands: status must agree with one of its neighbours.
            around = {before.get(row["job"]), after.get(row["job"])}
            assert row["slurm_state"] in around, (row, around)
            if row["slurm_state"] == "PENDING":
                assert row["state"] == "waiting"
            if row["slurm_state"] == "RUNNING":
                assert row["state"] == "running"
            seen.add(row["state"])
            compared += 1
        if all(row["state"] not in {"waiting", "running", "unknown"} for row in rows):
            break
    assert {row["state"] for row in rows} == {"finished"}, "\n".join(map(tell, runs))
    assert {"waiting", "running", "finished"} <= seen
    assert compared >= 40


def test_f80_with_the_controller_stopped_status_says_unknown_and_keeps_the_figures(
    tmp_path: Path, start_devcluster: object
) -> None:
    from slurm_pt.devcluster import DevClusterConfig

    cluster = start_devcluster(DevClusterConfig(nodes=1, accounting=False))  # type: ignore[operator]
    user = User(tmp_path, cluster)
    (run,) = user.submits(*SMALL, "train.steps=100000")
    user.waits_for_step(run, 3)
    cluster.stop_controller()
    (row,) = user.status()
    assert row["state"] == "unknown"
    assert row["step"] >= 3
    assert row["loss"] > 0
    before = row["step"]
    user.waits_for(lambda: user.status()[0]["step"] > before, "training to go on", [run])
    cluster.start_controller()
    user.waits_for(lambda: user.status()[0]["state"] == "running", "an answer", [run])
    assert user.types("slurm-pt", "cancel", str(run.path)).code == 0


def test_ctrl_c_detaches_says_how_to_come_back_and_leaves_the_jobs_running(user: User) -> None:
    launcher = user.starts(*user.sweep(*SMALL, "train.steps=100000", wait=True))
    user.waits_for(lambda: bool(list(user.root.glob("*/job.json"))), "submission")
    (run,) = find_runs([user.root])
    user.waits_for_step(run, 2)
    os.kill(launcher.pid, signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert f"slurm-pt status --watch {user.root}/sweeps/" in out
    assert "Traceback" not in out
    assert launcher.returncode == 0
    step = user.status()[0]["step"]
    user.waits_for(lambda: user.status()[0]["step"] > step, "training to go on", [run])
    user.types("slurm-pt", "cancel", str(run.path))


def test_f74_a_waiting_launcher_follows_all_points_and_fails_if_one_failed(user: User) -> None:
    # The second point reads a folder of tokens that is not there: the user's mistake.
    answer = user.types(
        *user.sweep(*SMALL, "train.steps=3", f"data.path=null,{user.folder}/nowhere", wait=True)
    )
    assert answer.code != 0
    assert "finished" in answer.text
    assert "failed" in answer.text
    assert f"{user.folder}/nowhere" in answer.text
    assert "Traceback" not in answer.text


def test_a_rendered_script_is_taken_by_plain_sbatch(user: User) -> None:
    overrides = (*SMALL, "train.steps=4", "parallel.tp=2", f"run_root={user.root}")
    rendered = user.types("slurm-pt", "render", *overrides)
    assert rendered.code == 0, rendered.err
    script = user.folder / "job.sh"
    script.write_text(rendered.out)
    assert user.types("sbatch", str(script)).code == 0
    (run,) = find_runs([user.root])
    user.waits_for_end(run)


def test_the_same_script_runs_under_srun_and_under_torchrun(user: User) -> None:
    overrides = (*SMALL, "train.steps=4", "parallel.tp=2", "parallel.dp=2")
    under_srun = user.types(
        "srun",
        "-N2",
        "--ntasks-per-node=2",
        sys.executable,
        str(TRAIN),
        *overrides,
        f"run_root={user.root}/srun",
    )
    assert under_srun.code == 0, under_srun.text
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4")
    under_torchrun = user.types(*torchrun, str(TRAIN), *overrides, f"run_root={user.root}/torchrun")
    assert under_torchrun.code == 0, under_torchrun.text
    (one,), (other,) = find_runs([user.root / "srun"]), find_runs([user.root / "torchrun"])
    assert [m["loss"] for m in one.read_metrics().values()] == [
        m["loss"] for m in other.read_metrics().values()
    ]


def test_your_own_loop_under_ddp_is_preempted_and_resumed(user: User) -> None:
    program = REPOSITORY / "docs" / "examples" / "own_loop.py"
    options = (
        "steps=2000",
        "parallel.dp=2",
        "slurm.nodes=2",
        "slurm.qos=low",
        "cluster.device=cpu",
    )
    fast = ("monitor.heartbeat_s=0",)
    (run,) = user.submits(*options, *fast, program=program)
    user.waits_for_step(run, 20)
    user.takes_nodes(nodes=4)
    user.waits_for_end(run)
    alone = user.without_slurm()
    (reference,) = alone.submits(*options, *fast, program=program)
    alone.waits_for_end(reference)
    events = [event["event"] for event in run.read_events()]
    assert "resumed" in events, tell(run)
    losses = [{step: m["loss"] for step, m in r.read_metrics().items()} for r in (run, reference)]
    assert losses[0] == losses[1]


def test_a_cancelled_run_is_submitted_again_by_its_folder(user: User) -> None:
    (run,) = user.submits(*SMALL, "train.steps=150")
    user.waits_for_step(run, 2)
    assert user.types("slurm-pt", "cancel", str(run.path)).code == 0
    user.waits_for(run.attempt(0).end.exists, "end", [run])
    user.waits_for(lambda: user.status()[0]["state"] == "cancelled", "state cancelled", [run])
    again = user.types("slurm-pt", "submit", "--run", str(run.path))
    assert again.code == 0, again.text
    user.waits_for(run.done.exists, "end of the second attempt", [run])
    assert run.read_events("resumed")[0]["step"] >= 2


def test_a_refused_start_by_hand_leaves_the_running_job_what_it_needs_to_resume(user: User) -> None:
    (run,) = user.submits(*SMALL, "train.steps=150", "slurm.qos=low")
    user.waits_for_step(run, 2)
    spec = run.spec.read_text()
    by_hand = user.types(*user.train(*SMALL, "train.steps=150", f"run_root={user.root}"))
    assert by_hand.code == 2, by_hand.text
    assert "belongs to Slurm job" in by_hand.text
    assert run.spec.read_text() == spec
    user.takes_nodes(nodes=4)
    user.waits_for_end(run)
