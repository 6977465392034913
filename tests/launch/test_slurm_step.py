"""Who am I: the variables of a Slurm step."""

from __future__ import annotations

import pytest

from slurm_pt.launch.environment import (
    Launcher,
    RankInfo,
    read_rank,
)
from tests.launch.environments import (
    BATCH_SHELL,
    CYCLIC_TASK_0,
    HET_TASK_3,
    SALLOC_SHELL,
    STALE_BATCH_SHELL,
    STEP_TASK_4,
    TORCHRUN,
    refusal,
    step,
)


def test_f05_a_task_of_a_step_knows_its_place_on_uneven_nodes():
    assert read_rank(STEP_TASK_4) == RankInfo(
        rank=4,
        world_size=7,
        local_rank=0,
        local_world_size=2,
        node_rank=1,
        num_nodes=3,
        launcher=Launcher.slurm,
        hosts=("n01", "n02", "n03"),
        ranks_per_node=(4, 2, 1),
        job_id="1",
        job_key="1",
        requeue_key="1",
        step_id="0",
    )


@pytest.mark.parametrize("shell", [BATCH_SHELL, SALLOC_SHELL, {}], ids=["batch", "salloc", "none"])
def test_a_shell_that_is_no_task_is_a_single_process(shell):
    info = read_rank(shell)
    assert (info.launcher, info.rank, info.world_size) == (Launcher.single, 0, 1)
    assert info.step_id is None
    assert info.job_id == shell.get("SLURM_JOB_ID")


@pytest.mark.parametrize("step_id", ["4294967290", "4294967291", "4294967292", "batch"])
def test_the_interactive_and_batch_steps_of_newer_slurms_hold_no_ranks(step_id):
    info = read_rank({**SALLOC_SHELL, "SLURM_STEP_ID": step_id, "SLURM_PROCID": "0"})
    assert info.launcher is Launcher.single
    assert info.step_id is None


def test_a_small_step_in_a_large_job_is_its_own_world():
    # srun -n2 -N1 in the 3-node, 7-task job: the job's node list stays, all else is the step's
    info = read_rank({**step(1, [2]), "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"})
    assert (info.rank, info.world_size, info.num_nodes, info.hosts) == (1, 2, 1, ("n1",))


def test_f12_the_step_variables_of_an_outer_job_are_not_taken_for_ours():
    message = refusal(read_rank, STALE_BATCH_SHELL)
    assert "SLURM_STEP_NUM_TASKS=4 but SLURM_NTASKS=1" in message


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_TASKS_PER_NODE": "4,2"}, "6 tasks on 2 nodes"),
        ({"SLURM_STEP_NODELIST": "n[01-02]"}, "SLURM_STEP_NODELIST names 2 hosts"),
        ({"SLURM_NODEID": "2"}, "SLURMD_NODENAME=n02"),
        ({"SLURM_NODEID": "5"}, "SLURM_NODEID=5"),
        ({"SLURM_PROCID": "9"}, "rank 9"),
        ({"SLURM_PROCID": "four"}, "SLURM_PROCID='four'"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID='-1'"),
        ({"SLURM_STEP_NODELIST": "n[01-"}, "'n[01-'"),
    ],
)
def test_f04_f05_a_step_that_contradicts_itself_is_refused(change, shown):
    assert shown in refusal(read_rank, STEP_TASK_4 | change)


def test_a_step_with_a_variable_missing_is_refused():
    environ = {k: v for k, v in STEP_TASK_4.items() if k != "SLURM_STEP_NODELIST"}
    assert "SLURM_STEP_NODELIST not" in refusal(read_rank, environ)


def test_ranks_dealt_out_across_nodes_are_refused_on_every_rank():
    assert "srun --distribution=block" in refusal(read_rank, CYCLIC_TASK_0)
    task_1 = {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_GTIDS": "1,4"}
    message = refusal(read_rank, CYCLIC_TASK_0 | task_1 | {"SLURMD_NODENAME": "n02"})
    assert "rank 1 is task 0 of node 1, which runs ranks 1,4" in message


def test_f04_an_explicit_host_list_overrides_what_cannot_be_read():
    odd = {**STEP_TASK_4, "SLURM_STEP_NODELIST": "n[1-3]-ib"}
    assert read_rank({**odd, "SLURM_PT_HOSTS": "a,b,c"}).hosts == ("a", "b", "c")
    assert "names 2 hosts" in refusal(read_rank, {**odd, "SLURM_PT_HOSTS": "a,b"})


def test_f09_a_heterogeneous_job_runs_whole_or_not_at_all():
    assert read_rank(HET_TASK_3).hosts == ("n01", "n02", "n03")
    plain_srun = HET_TASK_3 | {
        "SLURMD_NODENAME": "n01",
        "SLURM_GTIDS": "0",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NODELIST": "n01",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_TASKS_PER_NODE": "1",
    }
    message = refusal(read_rank, plain_srun)
    assert "heterogeneous job: not supported in part" in message
    assert "srun --het-group=0-1" in message


def test_an_array_task_is_requeued_alone():
    # job 15 with tasks 0-2: the last task's own id is the array's
    tasks = [
        {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": task, "SLURM_JOB_ID": job}
        for task, job in (("0", "16"), ("2", "15"))
    ]
    first, last = (read_rank(task) for task in tasks)
    assert (first.job_key, first.requeue_key) == ("15_0", "16")
    assert (last.job_key, last.requeue_key) == ("15_2", "15_2")
    assert read_rank({"SLURM_JOB_ID": "8"}).requeue_key == "8"
    assert read_rank({}).requeue_key is None


def test_the_array_id_of_an_outer_job_is_not_requeued():
    # sbatch from task 0 of array 5: the inner job 8 inherits SLURM_ARRAY_*, seen in 22.05.8
    stale = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "8"}
    assert read_rank(stale).requeue_key == "8"


def test_a_restart_is_counted():
    assert read_rank({"SLURM_RESTART_COUNT": "2"}).restart_count == 2
    assert read_rank(TORCHRUN).restart_count == 1
