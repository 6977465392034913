"""Runs with compiled parts beside runs without, on two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slurm_pt.config.choices import Recompute
from slurm_pt.config.schema import ParallelConfig
from slurm_pt.plan.layout import ParallelLayout
from tests.training.cases import LLAMA, MODEL, TRAIN, groups_of, train

CASES = {
    "gpt2, tp2": (MODEL, (2, 1, 1), Recompute.none),
    "llama, pp2, selective": (LLAMA, (1, 2, 1), Recompute.selective),
}
STEPS = 4


def curves(tokens: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Losses and gradient norms of each case, compiled and plain."""
    found = {}
    for name, (model, layout, recompute) in CASES.items():
        groups = groups_of(ParallelLayout(*layout), model)
        parallel = ParallelConfig(*layout)
        pair = []
        for compiled in (True, False):
            config = replace(TRAIN, steps=STEPS, recompute=recompute, compile=compiled)
            _, _, records, _ = train(tokens, model, config, groups, parallel=parallel)
            pair.append([x for record in records for x in (record.loss, record.grad_norm)])
        found[name] = (pair[0], pair[1])
        groups.close()
    return found
