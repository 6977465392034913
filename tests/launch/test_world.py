"""A world that does not fit the layout is refused before torch is imported."""

from __future__ import annotations

from slurm_pt.launch.environment import (
    check_world,
    read_rank,
)
from slurm_pt.plan.layout import ParallelLayout
from tests.launch.environments import (
    refusal,
    step,
)


def test_f07_a_world_of_another_size_is_refused_before_torch_is_imported():
    # --ntasks=1 --ntasks-per-node=2: one process runs, the layout needs two
    message = refusal(check_world, read_rank(step(0, [1])), ParallelLayout(tp=2, pp=1, dp=1))
    assert "1 ranks run (slurm: 1 on n1)" in message
    assert "parallel.tp=2 * parallel.pp=1 * parallel.dp=1 = 2" in message
    assert "slurm.nodes" in message


def test_one_process_is_told_how_several_are_started():
    message = refusal(check_world, read_rank({}), ParallelLayout(tp=2, pp=1, dp=2))
    assert "-m hydra/launcher=slurm_pt" in message
    assert "torchrun --nproc-per-node 4" in message


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
