"""Who am I: environments as Slurm 22.05.8, torchrun 2.13 and Open MPI set them.

The Slurm blocks were taken from tasks of a real 3-node cluster, without the lines that no reader
looks at.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurm_pt.errors import LaunchError
from slurm_pt.launch.environment import (
    Launcher,
    RankInfo,
    affinity_warning,
    check_world,
    pick_device_index,
    rank_host,
    read_rank,
    show_ranks,
    torch_environment,
)
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.submit.environment import clean_environment

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


# ---------------------------------------------------------------------------- the Slurm step


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


# ------------------------------------------------------------------------------ launchers


def test_f13_the_order_is_explicit_torchrun_mpi_slurm():
    assert read_rank(EXPLICIT).launcher is Launcher.explicit
    assert read_rank(TORCHRUN).launcher is Launcher.torchrun
    assert read_rank(OPEN_MPI).launcher is Launcher.mpi
    srun = step(1, [2])
    assert read_rank(srun).launcher is Launcher.slurm
    same = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank(srun | same).launcher is Launcher.torchrun
    assert read_rank(srun | same | EXPLICIT).launcher is Launcher.explicit


def test_torchrun_gives_node_and_local_rank():
    info = read_rank(TORCHRUN)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (3, 8, 3, 4)
    assert (info.node_rank, info.num_nodes, info.ranks_per_node) == (0, 2, (4, 4))


def test_f13_mpi_ranks_get_their_node_from_the_sizes():
    # OMPI_COMM_WORLD_NODE_RANK is the rank inside the node, despite its name
    info = read_rank(OPEN_MPI)
    assert (info.rank, info.node_rank, info.local_rank, info.num_nodes) == (5, 1, 1, 2)
    assert "--map-by slot" in refusal(read_rank, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"})


def test_f13_torchrun_and_mpirun_in_a_batch_script_are_not_taken_for_rank_0():
    assert read_rank(BATCH_SHELL | TORCHRUN).rank == 3
    assert read_rank(BATCH_SHELL | OPEN_MPI).rank == 5


def test_f13_one_torchrun_for_each_node_of_a_step_fits():
    info = read_rank(step(0, [1, 1]) | TORCHRUN)
    assert (info.launcher, info.rank, info.world_size) == (Launcher.torchrun, 3, 8)


@pytest.mark.parametrize(
    "inner",
    [
        # two tasks on one node, each with a torchrun --standalone of its own
        pytest.param(TORCHRUN | {"GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, id="torchrun"),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, id="mpirun"
        ),
        # export WORLD_SIZE=8 RANK=0 in the batch script
        pytest.param({"RANK": "0", "WORLD_SIZE": "8"}, id="by hand"),
        # export RANK=$SLURM_PROCID in the batch script: every task says 0
        pytest.param({"RANK": "0", "WORLD_SIZE": "2"}, id="right size, wrong rank"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, id="an image's default"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "4"}, id="pmi"),
    ],
)
def test_f13_two_launchers_that_disagree_are_named_with_their_values(inner):
    outer = step(1, [2])
    if inner == {"RANK": "0", "WORLD_SIZE": "1"}:
        outer = step(1, [1, 1])
    message = refusal(read_rank, outer | inner)
    assert "two launchers" in message
    assert "slurm (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2)" in message


def test_srun_with_pmi2_is_still_srun():
    # srun --mpi=pmi2 sets these two beside its own
    info = read_rank(step(1, [1, 1]) | {"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (info.launcher, info.node_rank) == (Launcher.slurm, 1)


def test_variables_set_by_hand_from_slurms_own_leave_the_place_to_slurm():
    by_hand = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    info = read_rank(step(3, [2, 2]) | by_hand)
    assert (info.launcher, info.local_rank, info.node_rank) == (Launcher.slurm, 1, 1)


def test_half_a_launcher_alone_is_refused():
    assert "LOCAL_RANK" in refusal(read_rank, {"RANK": "3", "WORLD_SIZE": "4"})
    assert "SLURM_PT_WORLD_SIZE" in refusal(read_rank, {"SLURM_PT_RANK": "0"})
    assert "TORCHELASTIC_RUN_ID" in refusal(read_rank, {"TORCHELASTIC_RUN_ID": "none"})


def test_a_stray_world_size_is_no_launcher():
    assert read_rank({"WORLD_SIZE": "8"}).launcher is Launcher.single
    assert read_rank({"WORLD_SIZE": "1", "RANK": "0"}).world_size == 1


def test_local_ranks_may_be_started_in_the_shell_of_srun_pty():
    # srun --pty -n4 bash: the shell is task 0 of 4, the three others have left
    shell = step(0, [4]) | {"SLURM_PTY_PORT": "45557"}
    assert read_rank(shell | EXPLICIT).world_size == 2
    # ... and a step inside that shell inherits SLURM_PTY_PORT, but is a step all the same
    assert read_rank(step(1, [2]) | {"SLURM_PTY_PORT": "45557"}).world_size == 2


def test_torchs_own_variables_give_back_the_same_rank():
    info = read_rank(step(3, [2, 2]))
    again = read_rank(step(3, [2, 2]) | torch_environment(info, "10.0.0.1", 4711))
    assert (again.rank, again.world_size, again.local_rank, again.node_rank) == (3, 4, 1, 1)
    assert torch_environment(info, "10.0.0.1", 4711)["MASTER_PORT"] == "4711"


# ----------------------------------------------------------------------------- the layout


def test_f07_a_world_of_another_size_is_refused_before_torch_is_imported():
    # --ntasks=1 --ntasks-per-node=2: one process runs, the layout needs two
    message = refusal(check_world, read_rank(step(0, [1])), ParallelLayout(tp=2, pp=1, dp=1))
    assert "1 ranks run (slurm: 1 on n1)" in message
    assert "parallel.tp=2 * parallel.pp=1 * parallel.dp=1 = 2" in message
    assert "slurm.nodes" in message


def test_f07_the_dp_that_fits_is_named():
    layout = ParallelLayout(tp=2, pp=1, dp=1)
    assert "parallel.dp=4 fits" in refusal(check_world, read_rank(step(0, [8])), layout)
    assert "no dp fits" in refusal(check_world, read_rank(step(0, [5])), layout)


def test_f05_uneven_nodes_are_refused_for_tensor_parallelism_with_the_counts():
    info = read_rank(step(0, [4, 2, 2]))
    message = refusal(check_world, info, ParallelLayout(tp=2, pp=1, dp=4))
    assert "4 on n1, 2 on n2, 2 on n3" in message
    check_world(info, ParallelLayout(tp=1, pp=2, dp=4))


def test_f05_a_tensor_group_that_would_straddle_nodes_needs_consent():
    info = read_rank(step(0, [3, 3]))
    layout = ParallelLayout(tp=2, pp=1, dp=3)
    assert "allow_tp_across_nodes" in refusal(check_world, info, layout)
    check_world(info, layout, allow_tp_across_nodes=True)
    check_world(read_rank(step(0, [4, 4])), ParallelLayout(tp=4, pp=1, dp=2))


def test_a_thousand_nodes_make_a_short_message():
    info = read_rank(step(0, [1] * 1000))
    assert len(refusal(check_world, info, ParallelLayout(tp=1, pp=1, dp=999))) < 900


# ------------------------------------------------------------------------------ small answers


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
