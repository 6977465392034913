"""From a configuration to the layout and the number of nodes and ranks that carry it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from slurm_pt.config import JobConfig, RunConfig
from slurm_pt.errors import ConfigError, Problem
from slurm_pt.plan.layout import ParallelLayout


@dataclass(frozen=True)
class Plan:
    """The split of a run and the allocation that it needs."""

    layout: ParallelLayout
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    """0: none is asked for."""
    num_microbatches: int | None
    """Forward passes of a rank per optimizer step; None where the loop is the user's own."""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Plan:
        return cls(**{**record, "layout": ParallelLayout(**record["layout"])})


def make_plan(config: JobConfig) -> Plan:
    """The plan that a configuration asks for. Raises ConfigError where its numbers disagree."""
    parallel, slurm = config.parallel, config.slurm
    most = config.cluster.ranks_per_node or slurm.gpus_per_node or config.cluster.gpus_per_node
    model_ranks = parallel.tp * parallel.pp
    dp = parallel.dp
    if dp is None:
        dp = max(1, slurm.nodes * most // model_ranks) if slurm.nodes and most else 1
    layout = ParallelLayout(tp=parallel.tp, pp=parallel.pp, dp=dp)
    nodes = slurm.nodes or (-(-layout.world_size // most) if most else 1)
    problems = list(_world_problems(layout, nodes, most))
    ranks_per_node = max(1, layout.world_size // nodes)
    if not problems and not parallel.allow_tp_across_nodes and ranks_per_node % parallel.tp:
        problems.append(_tensor_group_across_nodes(parallel.tp, ranks_per_node))
    num_microbatches = None
    if isinstance(config, RunConfig):
        group = config.train.micro_batch_size * dp
        num_microbatches, left_over = divmod(config.train.global_batch_size, group)
        if left_over:
            problems.append(
                Problem(
                    "train.global_batch_size",
                    config.train.global_batch_size,
                    f"must be a multiple of train.micro_batch_size={config.train.micro_batch_size}"
                    f" * dp={dp} (derived from slurm.nodes={slurm.nodes}) = {group}",
                    f"set train.global_batch_size={(num_microbatches + 1) * group}",
                )
            )
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
    )


def _world_problems(layout: ParallelLayout, nodes: int, most: int | None) -> list[Problem]:
    world = layout.world_size
    degrees = f"tp={layout.tp} * pp={layout.pp} * dp={layout.dp} = {world} ranks"
    model_ranks = layout.tp * layout.pp
    if world % nodes:
        dp_that_fits = max(1, world // nodes) * nodes
        fix = f"set slurm.nodes to a divisor of {world}"
        if dp_that_fits % model_ranks == 0:
            fix += f", or parallel.dp={dp_that_fits // model_ranks}"
        return [Problem("slurm.nodes", nodes, f"{degrees} cannot be spread evenly over it", fix)]
    if most and world // nodes > most:
        available = nodes * most
        fix = f"set slurm.nodes={-(-world // most)}"
        if available // model_ranks:
            fix += f", or parallel.dp={available // model_ranks}"
        rule = f"{degrees}, but {nodes} nodes of {most} ranks hold {available}"
        return [Problem("slurm.nodes", nodes, rule, fix)]
    return []


def _tensor_group_across_nodes(tp: int, ranks_per_node: int) -> Problem:
    return Problem(
        "parallel.tp",
        tp,
        f"with {ranks_per_node} ranks on a node a tensor group would span nodes, over slow links",
        f"set parallel.tp to a divisor of {ranks_per_node}, use fewer nodes, "
        "or set parallel.allow_tp_across_nodes=true",
    )
