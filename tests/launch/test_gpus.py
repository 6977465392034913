"""Which GPU a rank will use, from a driver's library that is played here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from slurm_pt.errors import LaunchError
from slurm_pt.launch import gpus
from slurm_pt.launch.environment import read_rank

PRESENT = ["GPU-1a2b", "GPU-1c00", "GPU-3333"]


def slurm_step(local_rank: int, ranks_on_node: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(ranks_on_node),
        "SLURM_STEP_TASKS_PER_NODE": str(ranks_on_node),
        "SLURM_PROCID": str(local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": "0",
    }


@pytest.fixture
def driver(monkeypatch):
    """NVML, showing the GPUs of the list that is handed out."""
    present = list(PRESENT)

    class Error(Exception):
        pass

    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        SimpleNamespace(
            NVMLError=Error,
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: len(present),
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetUUID=lambda handle: present[handle],
        ),
    )
    return present


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, PRESENT),
        ("", []),
        ("2,0", ["GPU-3333", "GPU-1a2b"]),
        ("GPU-3", ["GPU-3333"]),
        ("GPU-1", []),  # two begin so
        ("1, 7, 0", ["GPU-1c00"]),  # nothing after an unknown one
        ("-1", []),
        ("NoDevFiles", []),
        ("MIG-5/1/0", ["MIG-5/1/0"]),
    ],
)
def test_f14_cuda_visible_devices_is_read_as_cuda_reads_it(setting, seen):
    assert gpus.visible_gpus(PRESENT, setting) == seen


def test_f14_each_rank_names_its_own_gpu(driver):
    names = [gpus.own_gpu(read_rank(slurm_step(rank, 3)), {}, "cuda") for rank in range(3)]
    assert names == [(uuid,) for uuid in driver]
    bound = gpus.own_gpu(read_rank(slurm_step(2, 3)), {"CUDA_VISIBLE_DEVICES": "2"}, "cuda")
    assert bound == ("GPU-3333",)


def test_f14_too_few_gpus_are_told_before_torch_is_imported(driver):
    del driver[2]
    with pytest.raises(LaunchError, match="sees 2 GPUs for 3 ranks"):
        gpus.own_gpu(read_rank(slurm_step(0, 3)), {}, "cuda")


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_rank_that_will_use_the_cpu_names_no_gpu(driver, monkeypatch, device):
    monkeypatch.setattr(gpus, "_torch_version", lambda: "2.13.0+cpu")
    assert gpus.own_gpu(read_rank(slurm_step(0, 9)), {}, device) == ()


def test_without_a_driver_there_are_no_gpus(driver, monkeypatch):
    def no_driver():
        raise sys.modules["pynvml"].NVMLError("library not found")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", no_driver)
    assert gpus.list_gpus() == []
    assert gpus.own_gpu(read_rank(slurm_step(0, 1)), {}, "cuda") == ()
