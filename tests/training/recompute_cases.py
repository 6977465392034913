"""What the ranks of test_recompute do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from slurm_pt.config.choices import Recompute, Schedule
from slurm_pt.config.schema import LoraConfig, ParallelConfig
from slurm_pt.plan.layout import ParallelLayout
from tests.training.cases import LLAMA, TRAIN, engine_of, groups_of, never

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FOUR_LAYERS = replace(LLAMA, num_layers=4)
TRAINED = {
    "all weights": LoraConfig(),
    "adapters": LoraConfig(rank=3, targets=["query", "value", "attention.output", "up", "down"]),
}
WAYS = list(product(Schedule, Recompute, TRAINED))


def gradients(tokens: Path) -> dict[tuple[Schedule, Recompute, str], dict[str, Tensor]]:
    """Of one step at tp2 pp2 with a split sequence, for each way, by tensor rank and name."""
    groups = groups_of(ParallelLayout(2, 2, 1), FOUR_LAYERS)
    found = {}
    for schedule, recompute, trained in WAYS:
        virtual = 2 if schedule is Schedule.interleaved else 1
        engine = engine_of(
            tokens,
            FOUR_LAYERS,
            replace(TRAIN, recompute=recompute),
            groups,
            parallel=ParallelConfig(schedule=schedule, virtual_stages=virtual, sequence=True),
            lora=TRAINED[trained],
        )
        parameters = engine.model.trained_parameters()
        with torch.no_grad():
            for name, parameter in parameters.items():
                if "lora.b" in name:
                    parameter.fill_(0.03)  # with B = 0, as it begins, A has no gradient
        with engine.feed.ahead(range(1), prefetch=0) as data:
            engine.gradients(0, engine.feed.take(0, data, give_up=never) or [])
        tp_rank = groups.place.tp_rank
        found[schedule, recompute, trained] = {
            f"{tp_rank} {name}": parameter.grad
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
    groups.close()
    return found
