"""Started by hand, without Slurm: one process at a terminal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slurm_pt.monitor.status import find_runs
from tests.end_to_end.on_slurm import SMALL, User, assert_same_losses

pytestmark = pytest.mark.ranks


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path, None)


def test_ctrl_c_saves_and_the_same_command_goes_on_from_there(user: User) -> None:
    training = (*SMALL, "train.steps=60")
    command = user.train(*training, f"run_root={user.root}")
    process = user.starts(*command)
    user.waits_for(lambda: bool(list(user.root.glob("*/metrics.jsonl"))), "first step")
    (run,) = find_runs([user.root])
    user.waits_for_step(run, 5)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    assert "Ctrl-C again leaves at once" in out
    assert "Traceback" not in out
    assert run.committed_step() >= 5
    again = user.types(*command)
    assert again.code == 0, again.text
    assert run.read_events("resumed")[0]["step"] >= 5
    undisturbed = user.types(*user.train(*training, f"run_root={user.folder}/undisturbed"))
    assert undisturbed.code == 0, undisturbed.text
    assert_same_losses(run, find_runs([user.folder / "undisturbed"])[0])


def test_the_same_command_on_a_finished_run_says_so_and_ends_well(user: User) -> None:
    command = user.train(*SMALL, "train.steps=2", f"run_root={user.root}")
    assert user.types(*command).code == 0
    again = user.types(*command)
    assert again.code == 0
    assert "is finished" in again.text


def test_without_slurm_the_sweep_runs_on_local_processes_one_for_each_rank(user: User) -> None:
    (run,) = user.submits(*SMALL, "train.steps=3", "parallel.tp=2", "parallel.pp=2")
    user.waits_for_end(run)
    assert len(list(run.attempt(0).exits.glob("rank_*.json"))) == 4
