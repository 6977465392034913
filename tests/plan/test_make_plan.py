from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt.config import Schedule
from slurm_pt.errors import ConfigError
from slurm_pt.plan import ParallelLayout, Plan, make_plan
from tests.builders import read_job, read_small

SIX = {"train__global_batch_size": 6}


def problem_of(config):
    with pytest.raises(ConfigError) as caught:
        make_plan(config)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("asked", "tp_pp_dp", "nodes", "ranks_per_node", "microbatches"),
    [
        # 16 sequences a step, 2 a forward pass: 16 / (2 * dp) passes.
        ({}, (1, 1, 1), 1, 1, 8),
        ({"parallel__dp": 4}, (1, 1, 4), 1, 4, 2),
        ({"parallel__tp": 2, "parallel__pp": 2, "parallel__dp": 2}, (2, 2, 2), 1, 8, 4),
        # dp left out: what two nodes of four ranks leave after tp * pp = 2, so 8 / 2 = 4.
        ({"slurm__nodes": 2, "cluster__ranks_per_node": 4, "parallel__tp": 2}, (2, 1, 4), 2, 4, 2),
        # As few nodes of two ranks as hold eight.
        ({"parallel__dp": 8, "cluster__ranks_per_node": 2}, (1, 1, 8), 4, 2, 1),
        # Three ranks do not go evenly on two nodes of two; a tensor group of four not on six ranks.
        ({"parallel__dp": 3, "cluster__ranks_per_node": 2, **SIX}, (1, 1, 3), 3, 1, 1),
        (
            {"parallel__tp": 4, "parallel__dp": 3, "cluster__ranks_per_node": 6, **SIX},
            (4, 1, 3),
            3,
            4,
            1,
        ),
        ({"parallel__dp": 4, "slurm__nodes": 2}, (1, 1, 4), 2, 2, 2),
        ({"slurm__nodes": 1, "slurm__gpus_per_node": 8}, (1, 1, 8), 1, 8, 1),
    ],
)
def test_the_plan_of_a_configuration(asked, tp_pp_dp, nodes, ranks_per_node, microbatches):
    plan = make_plan(read_small(**asked))
    assert (plan.layout.tp, plan.layout.pp, plan.layout.dp) == tp_pp_dp
    assert (plan.nodes, plan.ranks_per_node) == (nodes, ranks_per_node)
    assert plan.num_microbatches == microbatches


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        ({}, 0),
        ({"slurm__gpus_per_node": 2, "parallel__dp": 2}, 2),
        ({"cluster__gpus_per_node": 8, "parallel__dp": 2}, 2),  # no more than there are ranks
        ({"cluster__gpus_per_node": 8, "parallel__dp": 2, "cluster__device": "cpu"}, 0),
    ],
)
def test_gpus_are_asked_for_when_there_are_some_and_they_are_used(asked, gpus):
    assert make_plan(read_small(**asked)).gpus_per_node == gpus


def test_a_loop_of_ones_own_has_no_microbatches():
    assert make_plan(read_job()).num_microbatches is None


def test_the_plan_says_how_a_pipeline_is_cut_and_run():
    # 4 layers.
    plan = make_plan(read_small(parallel__pp=3))
    assert (plan.schedule, plan.stage_layers) == (Schedule.one_f_one_b, (1, 2, 1))
    assert plan.virtual_stages == 1
    plan = make_plan(read_small(parallel__pp=2, parallel__stage_layers=[3, 1]))
    assert plan.stage_layers == (3, 1)
    asked = {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2}
    plan = make_plan(read_small(parallel__pp=2, **asked))
    assert (plan.schedule, plan.stage_layers) == (Schedule.interleaved, (1, 1, 1, 1))
    assert plan.virtual_stages == 2
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


def test_the_loop_of_ones_own_is_not_cut():
    plan = make_plan(read_job(parallel__pp=2))
    assert (plan.schedule, plan.stage_layers, plan.virtual_stages) == (None, None, 1)


def test_ranks_that_do_not_spread_evenly_are_refused_with_numbers():
    problem = problem_of(read_small(parallel__dp=3, slurm__nodes=2, train__global_batch_size=12))
    assert str(problem) == (
        "slurm.nodes=2: tp=1 * pp=1 * dp=3 = 3 ranks cannot be spread evenly over it. To fix: set "
        "slurm.nodes=1, or parallel.dp=2."
    )


def test_more_ranks_than_the_nodes_hold_are_refused_with_what_fits():
    problem = problem_of(read_small(parallel__dp=8, slurm__nodes=1, cluster__ranks_per_node=4))
    assert problem.rule == "tp=1 * pp=1 * dp=8 = 8 ranks, but 1 nodes of 4 ranks hold 4"
    assert problem.fix == "set slurm.nodes=2, or parallel.dp=4"


def test_a_tensor_group_across_nodes_is_refused_unless_allowed():
    asked = {"parallel__tp": 4, "slurm__nodes": 2, "train__global_batch_size": 16}
    problem = problem_of(read_small(**asked))
    assert "with 2 ranks on a node a tensor group would span nodes" in problem.rule
    assert "parallel.allow_tp_across_nodes=true" in problem.fix
    assert make_plan(read_small(**asked, parallel__allow_tp_across_nodes=True)).nodes == 2


def test_a_batch_that_the_derived_dp_does_not_divide_is_refused_f93():
    config = read_small(slurm__nodes=3, cluster__ranks_per_node=1)
    problem = problem_of(config)
    assert "train.micro_batch_size=2 * dp=3 (derived from slurm.nodes=3) = 6" in problem.rule
    assert problem.fix == "set train.global_batch_size=12 or 18"


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 4),
    dp=st.none() | st.integers(1, 9),
    nodes=st.none() | st.integers(1, 9),
    most=st.none() | st.integers(1, 9),
)
def test_a_plan_fits_or_what_is_proposed_does(tp, pp, dp, nodes, most):
    asked = {
        "parallel__tp": tp,
        "parallel__pp": pp,
        "parallel__dp": dp,
        "parallel__allow_tp_across_nodes": True,
        "slurm__nodes": nodes,
        "cluster__ranks_per_node": most,
    }
    try:
        plan = make_plan(read_job(**asked))
    except ConfigError as error:
        (problem,) = error.problems
        for key, value in re.findall(r"(slurm\.nodes|parallel\.dp)=(\d+)", problem.fix):
            make_plan(read_job(**asked | {key.replace(".", "__"): int(value)}))
        return
    assert plan.nodes * plan.ranks_per_node == plan.layout.world_size
    assert most is None or plan.ranks_per_node <= most
    assert nodes in {None, plan.nodes}
    assert dp in {None, plan.layout.dp}
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


@given(tp=st.integers(1, 4), pp=st.integers(1, 4), dp=st.integers(1, 4))
def test_every_rank_has_one_place_and_the_groups_are_a_partition(tp, pp, dp):
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    world = range(layout.world_size)
    assert [layout.rank(layout.place(rank)) for rank in world] == list(world)
    for members, size in ((layout.tp_ranks, tp), (layout.pp_ranks, pp), (layout.dp_ranks, dp)):
        groups = {members(rank) for rank in world}
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(world)
    assert all(layout.tp_ranks(r) == tuple(range(r - r % tp, r - r % tp + tp)) for r in world)


def test_a_rank_outside_the_world_and_a_degree_of_zero_are_refused():
    with pytest.raises(ValueError, match=r"rank 8 is not in 0\.\.7"):
        ParallelLayout(tp=2, pp=2, dp=2).place(8)
    with pytest.raises(ValueError, match="at least 1"):
        ParallelLayout(tp=0, pp=1, dp=1)
