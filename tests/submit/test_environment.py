from __future__ import annotations

import pytest

from slurm_pt.submit.environment import clean_environment, slurm_job_key


def test_what_belongs_to_an_outer_job_or_to_habit_is_dropped_f12():
    outer = {
        "SLURM_MEM_PER_CPU": "50",
        "SLURM_JOB_ID": "7",
        "SLURM_TIME_FORMAT": "relative",
        "SBATCH_PARTITION": "gpu",
        "SRUN_CPUS_PER_TASK": "4",
        "SLURMD_NODENAME": "n1",
        "SQUEUE_FORMAT": "%j",
        "SACCT_FORMAT": "jobid",
        "SINFO_FORMAT": "%n",
        "SCONTROL_ALL": "1",
        "SALLOC_NETWORK": "x",
        "SCANCEL_STATE": "PENDING",
        "SLURM_PT_RUN_DIR": "/runs/outer",
        "SLURM_PT_ATTEMPT_DIR": "/runs/outer/attempts/0",
    }
    users = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "MY_SLURM_X": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert clean_environment({**outer, **users}) == users


def test_the_way_to_the_cluster_is_kept():
    way = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CONF_SERVER": "c:1", "SLURM_PT_DEVCLUSTER": "/d"}
    assert clean_environment(way) == way


def test_what_the_user_names_is_kept_f12():
    assert clean_environment({"SLURM_JWT": "x", "SLURM_A": "y"}, keep=["SLURM_JWT"]) == {
        "SLURM_JWT": "x"
    }


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "8"}, "8"),
        ({"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "7_0"),
        ({"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7"}, "8"),
    ],
)
def test_a_job_is_named_so_that_a_requeue_spares_its_siblings(environ, key):
    assert slurm_job_key(environ) == key
