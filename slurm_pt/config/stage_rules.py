"""What the stages of a pipeline and their schedule must fulfil."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_pt.config.choices import Schedule
from slurm_pt.config.schema import RunConfig
from slurm_pt.errors import Problem


def stage_rules(config: RunConfig) -> Iterator[Problem]:
    """Every broken rule of the pipeline."""
    parallel, num_layers = config.parallel, config.model.num_layers
    pp, virtual_stages = parallel.pp, parallel.virtual_stages
    if min(num_layers, pp, virtual_stages) < 1:
        return
    if pp > num_layers:
        yield Problem(
            "parallel.pp",
            pp,
            f"more stages than model.num_layers={num_layers}; each stage needs a layer",
            f"set parallel.pp={num_layers} or less",
        )
        return
    yield from _schedule_rules(config)
    stages = pp * virtual_stages
    if stages > num_layers:
        fitting = num_layers // pp
        yield Problem(
            "parallel.virtual_stages",
            virtual_stages,
            f"with parallel.pp={pp} makes {stages} stages, more than model.num_layers={num_layers}",
            f"set parallel.virtual_stages={fitting}"
            + (" and parallel.schedule=one_f_one_b" if fitting == 1 else " or less"),
        )
    elif parallel.stage_layers is not None:
        yield from _stage_layers_rules(parallel.stage_layers, stages, config)


def _schedule_rules(config: RunConfig) -> Iterator[Problem]:
    parallel, key = config.parallel, "parallel.virtual_stages"
    interleaved = parallel.schedule is Schedule.interleaved
    if interleaved and parallel.pp == 1:
        yield Problem(
            "parallel.schedule",
            parallel.schedule.value,
            "with parallel.pp=1 there is nothing to interleave",
            "set parallel.schedule=one_f_one_b and parallel.virtual_stages=1",
        )
    elif interleaved and parallel.virtual_stages == 1:
        rule = "parallel.schedule=interleaved needs 2 or more stages on each rank"
        yield Problem(key, 1, rule, f"set {key}=2, or parallel.schedule=one_f_one_b")
    elif not interleaved and parallel.virtual_stages > 1:
        rule = f"parallel.schedule={parallel.schedule.value} has one stage on each rank"
        fix = f"set {key}=1, or parallel.schedule=interleaved"
        yield Problem(key, parallel.virtual_stages, rule, fix)


def _stage_layers_rules(sizes: list[int], stages: int, config: RunConfig) -> Iterator[Problem]:
    key, num_layers = "parallel.stage_layers", config.model.num_layers
    even, left_over = divmod(num_layers, stages)
    example = [even + (stage < left_over) for stage in range(stages)]
    fix = f"for example {key}={example}, or null".replace(", ", ",").replace(",or", ", or")
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        yield Problem(key, sizes, "numbers of layers, each at least 1", fix)
    elif len(sizes) != stages:
        counted = f"parallel.pp={config.parallel.pp} * parallel.virtual_stages="
        rule = f"{len(sizes)} numbers for {counted}{config.parallel.virtual_stages} = {stages}"
        yield Problem(key, sizes, f"{rule} stages", fix)
    elif sum(sizes) != num_layers:
        rule = f"adds up to {sum(sizes)} layers, not to model.num_layers={num_layers}"
        yield Problem(key, sizes, rule, fix)
