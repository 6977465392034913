"""What the stages of a pipeline and their schedule must fulfil."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_pt.config.choices import Recompute, Schedule
from slurm_pt.config.model_rules import divisors
from slurm_pt.config.schema import RunConfig
from slurm_pt.errors import Problem

MOST_STAGES = 1024


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
    if pp * virtual_stages > MOST_STAGES:
        rule = f"parallel.pp * parallel.virtual_stages is more than {MOST_STAGES} stages"
        yield Problem("parallel.pp", pp, rule, "set fewer: their schedule is planned step by step")
        return
    yield from _schedule_rules(config)
    yield from _recompute_rules(config)
    share = config.model.share_layers
    if share < 1 or num_layers % share:
        yield _share_problem(share, num_layers)
        return
    stages = pp * virtual_stages
    if share > 1 and stages > num_layers // share:
        yield _too_few_groups(config, stages)
    elif stages > num_layers:
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
    share = config.model.share_layers
    even, left_over = divmod(num_layers // share, stages)
    example = [(even + (stage < left_over)) * share for stage in range(stages)]
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
    elif any(size % share for size in sizes):
        rule = f"layers that share weights (model.share_layers={share}) must be on one stage"
        yield Problem(key, sizes, rule, fix)


def _share_problem(share: int, num_layers: int) -> Problem:
    rule = f"must divide model.num_layers={num_layers}"
    fix = f"set it to one of {divisors(num_layers)}"
    return Problem("model.share_layers", share, rule, fix)


def _too_few_groups(config: RunConfig, stages: int) -> Problem:
    share, num_layers = config.model.share_layers, config.model.num_layers
    groups = num_layers // share
    pp, virtual_stages = config.parallel.pp, config.parallel.virtual_stages
    rule = (
        f"makes {groups} groups out of {num_layers} layers, and layers that share weights must be "
        f"on one stage: parallel.pp={pp} * parallel.virtual_stages={virtual_stages} = {stages} "
        "stages are more"
    )
    fitting = max(size for size in range(1, share) if num_layers % size == 0)
    fix = f"use {groups} stages or less, or set model.share_layers={fitting}"
    return Problem("model.share_layers", share, rule, fix)


def _recompute_rules(config: RunConfig) -> Iterator[Problem]:
    each, key = config.train.recompute_stages, "train.recompute_stages"
    if each is None:
        return
    names = [choice.value for choice in each]
    stages = config.parallel.pp * config.parallel.virtual_stages
    if len(each) != stages:
        rule = f"{len(each)} values for {stages} stages (parallel.pp * parallel.virtual_stages)"
        example = f"[{','.join(['selective'] + ['none'] * (stages - 1))}]"
        yield Problem(key, names, rule, f"for example {key}={example}, or null")
    if config.train.recompute is not Recompute.none:
        rule = f"excludes train.recompute={config.train.recompute.value}"
        yield Problem(key, names, rule, "set train.recompute=none, or train.recompute_stages=null")
