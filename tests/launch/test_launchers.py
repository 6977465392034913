"""Who am I: which launcher is believed, and two that disagree."""

from __future__ import annotations

import pytest

from slurm_pt.launch.environment import (
    Launcher,
    read_rank,
    torch_environment,
)
from tests.launch.environments import (
    BATCH_SHELL,
    EXPLICIT,
    OPEN_MPI,
    TORCHRUN,
    refusal,
    step,
)


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
