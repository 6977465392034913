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


ONE_GPU = """
class NVMLError(Exception): ...
def nvmlInit(): ...
def nvmlShutdown(): ...
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return "GPU-5f3a"
"""


def test_f14_two_ranks_on_one_gpu_are_refused_with_the_way_out(user: User) -> None:
    (user.folder / "driver").mkdir()
    (user.folder / "driver" / "pynvml.py").write_text(ONE_GPU)
    user.environ |= {"PYTHONPATH": str(user.folder / "driver"), "CUDA_VISIBLE_DEVICES": "0"}
    overrides = (*SMALL, "parallel.dp=2", "cluster.device=cuda", f"run_root={user.root}")
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2", *user.train(*overrides)[1:])
    answer = user.types(*torchrun)
    assert answer.code != 0
    said = [line for line in answer.text.splitlines() if "use the same GPU GPU-5f3a" in line]
    assert said, answer.text  # by both, unless torchrun ends the other one first
    assert "slurm.gpus_per_node" in said[0]
