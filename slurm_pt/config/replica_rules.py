"""What the copies of a model, the data-parallel ranks, must fulfil."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_pt.config.schema import RunConfig
from slurm_pt.errors import Problem

ZERO_STAGES = (0, 1)
"""What our own engine can do."""


def replica_rules(config: RunConfig) -> Iterator[Problem]:
    """Every broken rule of the copies."""
    zero = config.parallel.zero
    if zero not in ZERO_STAGES:
        rule = "a ZeRO stage of the trainer is 0 or 1: gradients and weights are not split"
        fix = "set parallel.zero=1; to hold less of the weights raise parallel.tp or parallel.pp"
        yield Problem("parallel.zero", zero, rule, fix)
