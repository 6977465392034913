"""From a configuration to the layout and the number of nodes and ranks that carry it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from slurm_pt.config import JobConfig, RunConfig, Schedule
from slurm_pt.config.batch_rules import batch_problem
from slurm_pt.config.batch_rules import num_microbatches as count_microbatches
from slurm_pt.errors import ConfigError, Problem
from slurm_pt.plan.layout import ParallelLayout, split_layers


@dataclass(frozen=True)
class Plan:
    """The split of a run and the allocation that it needs."""

    layout: ParallelLayout
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    """0: none is asked for."""
    num_microbatches: int | None
    """Micro-batches of a rank per optimizer step; None where the loop is the user's own."""
    schedule: Schedule | None
    """In which order a pipeline runs them; None where the loop is the user's own."""
    stage_layers: tuple[int, ...] | None
    """Layers of each of the pp * virtual_stages stages; None where the loop is the user's own."""

    @property
    def virtual_stages(self) -> int:
        """Stages that each rank holds."""
        return 1 if self.stage_layers is None else len(self.stage_layers) // self.layout.pp

    def as_json(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        return record | {"schedule": None if self.schedule is None else self.schedule.value}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Plan:
        schedule, layers = record["schedule"], record["stage_layers"]
        return cls(
            **record
            | {
                "layout": ParallelLayout(**record["layout"]),
                "schedule": None if schedule is None else Schedule(schedule),
                "stage_layers": None if layers is None else tuple(layers),
            }
        )


def make_plan(config: JobConfig) -> Plan:
    """The plan that a configuration asks for. Raises ConfigError where its numbers disagree."""
    parallel, slurm = config.parallel, config.slurm
    most = config.cluster.ranks_per_node or slurm.gpus_per_node or config.cluster.gpus_per_node
    dp = parallel.dp or _most_copies(parallel.tp * parallel.pp, slurm.nodes, most)
    layout = ParallelLayout(tp=parallel.tp, pp=parallel.pp, dp=dp)
    nodes = slurm.nodes or _fewest_nodes(layout, most)
    problems = _world_problems(layout, nodes, most)
    ranks_per_node = max(1, layout.world_size // nodes)
    if not problems and not parallel.allow_tp_across_nodes and ranks_per_node % parallel.tp:
        problems.append(_tensor_group_across_nodes(parallel.tp, ranks_per_node))
    num_microbatches = schedule = stage_layers = None
    if isinstance(config, RunConfig):
        schedule, stage_layers = parallel.schedule, _stage_layers(config)
        derived = f"dp={dp} (derived from slurm.nodes={slurm.nodes})"
        problem = batch_problem(config.train, dp, degree=derived)
        if problem is None:
            num_microbatches = count_microbatches(config.train, dp)
        else:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    there_are = None if config.cluster.device == "cpu" else config.cluster.gpus_per_node
    wants_gpus = slurm.gpus_per_node or there_are
    return Plan(
        layout=layout,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=min(wants_gpus, ranks_per_node) if wants_gpus else 0,
        num_microbatches=num_microbatches,
        schedule=schedule,
        stage_layers=stage_layers,
    )


def _stage_layers(config: RunConfig) -> tuple[int, ...]:
    """How many layers each stage has."""
    parallel = config.parallel
    stages = parallel.pp * parallel.virtual_stages
    split = split_layers(
        config.model.num_layers,
        stages,
        parallel.stage_layers,
        share=config.model.share_layers,
    )
    return tuple(len(layers) for layers in split)


def _most_copies(model_ranks: int, nodes: int | None, most: int | None) -> int:
    """As many copies of the model as the nodes hold evenly; 1 where nodes do not tell."""
    if nodes is None or most is None:
        return 1
    copies = range(nodes * most // model_ranks, 0, -1)
    return next((dp for dp in copies if _holds(dp * model_ranks, nodes, most)), 1)


def _fewest_nodes(layout: ParallelLayout, most: int | None) -> int:
    """As few nodes as hold the ranks evenly; tensor groups stay inside a node where that can be."""
    world = layout.world_size
    least = -(-world // most) if most else 1
    even = [nodes for nodes in range(least, world + 1) if world % nodes == 0]
    return next((nodes for nodes in even if world // nodes % layout.tp == 0), even[0])


def _world_problems(layout: ParallelLayout, nodes: int, most: int | None) -> list[Problem]:
    world = layout.world_size
    if _holds(world, nodes, most):
        return []
    degrees = f"tp={layout.tp} * pp={layout.pp} * dp={layout.dp} = {world} ranks"
    if world % nodes:
        rule = f"{degrees} cannot be spread evenly over it"
    else:
        rule = f"{degrees}, but {nodes} nodes of {most} ranks hold {nodes * (most or 0)}"
    fitting = [number for number in range(1, world + 1) if _holds(world, number, most)]
    fix = f"set slurm.nodes={min(fitting, key=lambda number: abs(number - nodes))}"
    model_ranks = layout.tp * layout.pp
    degrees_that_fit = [
        dp for dp in range(1, layout.dp + nodes + 1) if _holds(dp * model_ranks, nodes, most)
    ]
    if degrees_that_fit:
        fix += f", or parallel.dp={min(degrees_that_fit, key=lambda dp: abs(dp - layout.dp))}"
    return [Problem("slurm.nodes", nodes, rule, fix)]


def _holds(world: int, nodes: int, most: int | None) -> bool:
    return world % nodes == 0 and (most is None or world // nodes <= most)


def _tensor_group_across_nodes(tp: int, ranks_per_node: int) -> Problem:
    return Problem(
        "parallel.tp",
        tp,
        f"with {ranks_per_node} ranks on a node a tensor group would span nodes, over slow links",
        f"set parallel.tp to a divisor of {ranks_per_node}, use fewer nodes, "
        "or set parallel.allow_tp_across_nodes=true",
    )
