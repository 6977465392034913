"""Environments as Slurm 22.05.8, torchrun 2.13 and Open MPI set them.

The Slurm blocks were taken from tasks of a real 3-node cluster, without the lines that no reader
looks at.
"""

from __future__ import annotations

import pytest

from slurm_pt.errors import LaunchError

# sbatch -N3 -n7, `env` in the batch shell
BATCH_SHELL = {
    "SLURMD_NODENAME": "n01",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_CPUS_PER_NODE": "4,2,1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[01-03]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "4,2,1",
}

# the same job, `srun env`, task 4
STEP_TASK_4 = BATCH_SHELL | {
    "SLURMD_NODENAME": "n02",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_GTIDS": "4,5",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,2,1",
}

# the same job, `srun -m cyclic env`, task 0 (SLURM_DISTRIBUTION is cyclic by default where each
# node has one task, so it tells nothing)
CYCLIC_TASK_0 = STEP_TASK_4 | {
    "SLURMD_NODENAME": "n01",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_GTIDS": "0,3,5,6",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}

SALLOC_SHELL = {
    "SLURM_JOB_ID": "9",
    "SLURM_JOB_NODELIST": "n[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
}

# sbatch from task 3 of a 4-task step: batch shell of the inner job, with the outer step's variables
STALE_BATCH_SHELL = {
    "SLURMD_NODENAME": "n01",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "13",
    "SLURM_JOB_NODELIST": "n01",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_TASKS_PER_NODE": "1",
}

# sbatch -N1 -n1 : -N2 -n3, `srun --het-group=0,1 env`, task 3
HET_TASK_3 = {
    "SLURMD_NODENAME": "n03",
    "SLURM_GTIDS": "3",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "n[01-03]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n01",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[02-03]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1,2,1",
    "SLURM_TASKS_PER_NODE": "1,2,1",
}

TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "8",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}

EXPLICIT = {
    "SLURM_PT_RANK": "1",
    "SLURM_PT_WORLD_SIZE": "2",
    "SLURM_PT_LOCAL_RANK": "1",
    "SLURM_PT_LOCAL_WORLD_SIZE": "2",
    "SLURM_PT_NODE_RANK": "0",
    "SLURM_PT_NUM_NODES": "1",
}


def step(rank, counts, *, job_id="7"):
    """The environment of one task of a block step on nodes n1, n2 ..."""
    node = next(n for n in range(len(counts)) if rank < sum(counts[: n + 1]))
    first = sum(counts[:node])
    tasks = ",".join(str(count) for count in counts)
    return {
        "SLURMD_NODENAME": f"n{node + 1}",
        "SLURM_GTIDS": ",".join(str(r) for r in range(first, first + counts[node])),
        "SLURM_JOB_ID": job_id,
        "SLURM_LOCALID": str(rank - first),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_TASKS_PER_NODE": tasks,
    }


def refusal(call, *arguments, **options):
    with pytest.raises(LaunchError) as caught:
        call(*arguments, **options)
    assert "To fix: " in str(caught.value)
    return str(caught.value)
