"""Small answers about this rank: device, hosts, CPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurm_pt.launch.environment import (
    affinity_warning,
    pick_device_index,
    rank_host,
    read_rank,
    show_ranks,
)
from slurm_pt.submit.environment import clean_environment
from tests.launch.environments import (
    EXPLICIT,
    STEP_TASK_4,
    refusal,
    step,
)


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(1, 3, 0), (8, 3, 3), (9, 3, 3)])
def test_f14_the_device_is_0_when_one_is_visible_else_the_local_rank(visible, local_rank, index):
    assert pick_device_index(visible, read_rank(step(local_rank, [8]))) == index


@pytest.mark.parametrize("visible", [0, 2, 7])
def test_f14_fewer_gpus_than_ranks_are_refused(visible):
    message = refusal(pick_device_index, visible, read_rank(step(3, [8])))
    assert f"rank 3 on n1 sees {visible} GPUs for 8 ranks" in message


def test_ranks_are_shown_by_node():
    info = read_rank(step(0, [2, 2, 2]))
    assert [rank_host(info, rank) for rank in range(6)] == ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert show_ranks(info, [5, 2, 3, 0]) == "rank 0 on n1; ranks 2-3 on n2; rank 5 on n3"
    assert show_ranks(read_rank(EXPLICIT), [1]) == "rank 1 on node 0"
    assert show_ranks(read_rank(step(0, [1] * 50)), list(range(50))).endswith("and 30 more nodes")


def test_f12_a_submission_sees_no_variable_of_the_outer_job():
    environ = STEP_TASK_4 | {
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_PARTITION": "x",
        "SRUN_CPUS_PER_TASK": "2",
        "SQUEUE_FORMAT": "%i",
        "SLURM_MEM_PER_CPU": "50",
        "MY_DATA": "/data",
        "SLURM_TIME_FORMAT": "%s",
    }
    assert clean_environment(environ, keep=["SLURM_TIME_FORMAT"]) == {
        "SLURM_CONF": "/etc/slurm.conf",
        "MY_DATA": "/data",
        "SLURM_TIME_FORMAT": "%s",
    }


def test_f19_a_rank_with_fewer_cpus_than_asked_for_is_warned():
    assert affinity_warning(8, 8) is None
    assert affinity_warning(None, 1) is None
    warning = affinity_warning(8, 1)
    assert warning is not None
    assert "slurm.cpus_per_task=8" in warning


def test_the_launch_modules_are_read_without_torch():
    modules = ("environment", "network", "node_list", "rendezvous")
    code = "import sys\n" + "".join(f"import slurm_pt.launch.{name}\n" for name in modules)
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
