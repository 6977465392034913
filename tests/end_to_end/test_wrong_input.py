"""What users type wrong: one clear message, exit code 2, no traceback, nothing submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_pt.devcluster import DevCluster
from tests.end_to_end.on_slurm import SMALL, User

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(tmp_path: Path, devcluster: DevCluster) -> User:
    return User(tmp_path, devcluster)


def jobs_of(user: User) -> set[str]:
    return set(user.types("squeue", "-h", "-t", "all", "-o", "%A").out.split())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        pytest.param(
            ["parallel.tp=3"],
            ["parallel.tp=3", "model.num_heads=4", "1, 2, 4"],
            id="f91 tp does not divide the heads",
        ),
        pytest.param(
            ["parallel.pp=5"],
            ["parallel.pp=5", "model.num_layers=4", "parallel.pp=4"],
            id="more stages than layers",
        ),
        pytest.param(
            ["parallel.dp=3"],
            ["train.global_batch_size=8", "= 6", "train.global_batch_size=6 or 12"],
            id="f93 a global batch that does not divide",
        ),
        pytest.param(
            ["slurm.partition=nope"],
            ["nope", "slurm.partition", "main", "debug", "invalid partition"],
            id="f97 unknown partition",
        ),
        pytest.param(
            ["slurm.qos=nope"], ["slurm.qos", "low", "normal", "Invalid qos"], id="f97 unknown qos"
        ),
        pytest.param(
            ["slurm.account=nope"], ["slurm.account", "demo", "Invalid account"], id="f97 account"
        ),
        pytest.param(["slurm.mem=1.5G"], ["slurm.mem='1.5G'", "slurm.mem=1536M"], id="f94 1.5G"),
        pytest.param(["slurm.mem=64GiB"], ["slurm.mem='64GiB'", "slurm.mem=64G"], id="f94 GiB"),
        pytest.param(["slurm.mem='64 GB'"], ["slurm.mem='64 GB'", "slurm.mem=64G"], id="f94 space"),
        pytest.param(
            ["slurm.mem=1G", "slurm.mem_per_cpu=1G"],
            ["slurm.mem and slurm.mem_per_cpu exclude each other"],
            id="f96 two forms of memory",
        ),
        pytest.param(["slurm.time=24h"], ["slurm.time='24h'", "1-0"], id="f95 24h"),
        pytest.param(
            ["train.lerning_rate=1"], ["train.lerning_rate", "no such key"], id="no such key"
        ),
        pytest.param(["train.stepz=1"], ["train.stepz", "train.steps"], id="a misspelt key"),
        pytest.param(
            ["run_root=/proc/nowhere"],
            ["run_root", "/proc/nowhere"],
            id="a folder nobody can write",
        ),
    ],
)
def test_wrong_input_is_refused_before_anything_is_submitted(
    user: User, overrides: list[str], words: list[str]
) -> None:
    before = jobs_of(user)
    answer = user.types(*user.sweep(*SMALL, "train.steps=2", *overrides))
    assert answer.code == 2, answer.text
    assert "Traceback" not in answer.text
    missing = [word for word in words if word not in answer.text]
    assert not missing, f"{missing} not in:\n{answer.text}"
    assert not jobs_of(user) - before  # Slurm forgets ended jobs meanwhile


def test_f68_every_point_is_checked_before_the_first_is_submitted(user: User) -> None:
    answer = user.types(*user.sweep(*SMALL, "train.steps=2", "parallel.tp=1,3,2,8"))
    assert answer.code == 2
    assert "point 1" in answer.text
    assert "point 3" in answer.text
    assert "point 2" not in answer.text
    assert not user.root.exists()
