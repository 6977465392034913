"""What compressed gradients and local updates must fulfil."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_pt.config.choices import DType, GradientCompression, Outer
from slurm_pt.config.schema import RunConfig
from slurm_pt.errors import Problem


def slow_link_rules(config: RunConfig) -> Iterator[Problem]:
    """Every broken rule."""
    yield from _compression_rules(config)
    yield from _local_rules(config)


def _compression_rules(config: RunConfig) -> Iterator[Problem]:
    parallel, train = config.parallel, config.train
    key, kind = "parallel.gradient_compression", parallel.gradient_compression
    if parallel.powersgd_rank < 1:
        fix = "set parallel.powersgd_rank=4"
        yield Problem("parallel.powersgd_rank", parallel.powersgd_rank, "must be at least 1", fix)
    start = parallel.powersgd_start_step
    if start < 0:
        fix = "set parallel.powersgd_start_step=0 or more"
        yield Problem("parallel.powersgd_start_step", start, "must not be negative", fix)
    if kind is GradientCompression.powersgd:
        if start >= train.steps:
            rule = f"nothing would be compressed in train.steps={train.steps}"
            fix = f"set parallel.powersgd_start_step={train.steps // 10}, or {key}=none"
            yield Problem("parallel.powersgd_start_step", start, rule, fix)
        if train.dtype is DType.float16:
            rule = (
                "the errors it remembers are lost when train.dtype=float16 changes its loss scale"
            )
            yield Problem(key, kind.value, rule, f"set train.dtype=bfloat16, or {key}=none")
    if kind is not GradientCompression.none and parallel.zero > 0:
        rule = f"with parallel.zero={parallel.zero} no replica has the whole sum of a gradient"
        yield Problem(key, kind.value, rule, f"set {key}=none, or parallel.zero=0")
    if kind is not GradientCompression.none and train.local_steps > 1:
        rule = f"with train.local_steps={train.local_steps} replicas send weights, not gradients"
        yield Problem(key, kind.value, rule, f"set {key}=none, or train.local_steps=1")


def _local_rules(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    for key, value, least in (
        ("train.local_steps", train.local_steps, 1),
        ("train.local_after", train.local_after, 0),
    ):
        if value < least:
            rule = f"must be at least {least}"
            yield Problem(key, value, rule, f"set {key}={least} or more")
    if not train.outer_lr > 0:
        yield Problem(
            "train.outer_lr", train.outer_lr, "must be positive", "set train.outer_lr=0.7"
        )
    if not 0 <= train.outer_momentum < 1:
        fix = "set train.outer_momentum=0.9, or leave it out"
        yield Problem("train.outer_momentum", train.outer_momentum, "must be in [0, 1)", fix)
    if train.local_steps <= 1:
        if train.outer is not Outer.average:
            rule = f"has no effect with train.local_steps={train.local_steps}"
            yield Problem("train.outer", train.outer.value, rule, "set train.local_steps=50")
        return
    if config.parallel.zero > 0:
        rule = f"with parallel.zero={config.parallel.zero} a replica updates only its own part"
        fix = "set train.local_steps=1, or parallel.zero=0"
        yield Problem("train.local_steps", train.local_steps, rule, fix)
    if train.local_after >= train.steps:
        rule = f"no update would be local in train.steps={train.steps}"
        fix = f"set train.local_after={train.steps // 2}, or train.local_steps=1"
        yield Problem("train.local_after", train.local_after, rule, fix)
    interval, local_steps = train.eval_interval, train.local_steps
    if interval is not None and interval % local_steps:
        rule = f"replicas have the same weights only after every train.local_steps={local_steps}"
        up = -(-interval // local_steps) * local_steps
        yield Problem("train.eval_interval", interval, rule, f"set train.eval_interval={up}")
