"""What the ranks of the tests of adapters and of shared layers run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurm_pt.config.choices import Recompute, Schedule
from slurm_pt.config.schema import LoraConfig, ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.plan.layout import ParallelLayout
from tests.training.cases import LLAMA, MODEL, TRAIN, build, groups_of, train
from tests.training.traffic_cases import counting

if TYPE_CHECKING:
    from pathlib import Path

    from slurm_pt.training.rank_model import RankModel

Layout = tuple[int, int, int]
"""(tp, pp, dp)."""
EVERYWHERE = LoraConfig(
    rank=3, alpha=6.0, targets=["query", "key", "value", "attention.output", "up", "down"]
)
GATED = replace(EVERYWHERE, targets=[*EVERYWHERE.targets, "gate"])
SHORT = replace(TRAIN, steps=4, lr=2e-2, warmup_steps=1, grad_clip=0.03)
SPLIT = ParallelConfig(sequence=True)
ZERO_BUBBLE = ParallelConfig(schedule=Schedule.zero_bubble)


@dataclass(frozen=True)
class Case:
    """What is trained, and how its pipeline runs."""

    model: ModelConfig = MODEL
    lora: LoraConfig = EVERYWHERE
    train: TrainConfig = SHORT
    parallel: ParallelConfig = ParallelConfig()


@dataclass(frozen=True)
class Trained:
    """What one rank saw of a run."""

    losses: list[float]
    norms: list[float]
    frozen_bits_are_those_of_the_start: bool
    only_adapters_have_gradients: bool
    tensor_bytes: float
    """Sent over the tensor group."""


def trained(
    folder: Path, wanted: dict[Layout, dict[str, Case]]
) -> dict[Layout, dict[str, Trained]]:
    """What each case gives in each layout."""
    found: dict[Layout, dict[str, Trained]] = {}
    for layout, cases in wanted.items():
        found[layout] = {}
        for name, case in cases.items():
            groups = groups_of(ParallelLayout(*layout), case.model)
            settings = {"parallel": case.parallel, "lora": case.lora}
            fresh = frozen_bits(build(case.model, case.train, groups, **settings))
            with counting(groups) as sent:
                stage, optimizer, records, _ = train(
                    folder, case.model, case.train, groups, **settings
                )
            with_gradient = {n for n, p in stage.named_parameters() if p.grad is not None}
            found[layout][name] = Trained(
                [record.loss for record in records],
                [record.grad_norm for record in records],
                frozen_bits(stage) == fresh,
                with_gradient == set(optimizer.parameters) == set(stage.trained_parameters()),
                sent["tensor"],
            )
            groups.close()
    return found


def frozen_bits(stage: RankModel) -> dict[str, str]:
    """A digest of each frozen parameter."""
    return {
        name: hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for name, parameter in stage.named_parameters()
        if not parameter.requires_grad
    }


LORA: dict[str, Case] = {
    "gpt2": Case(),
    "gpt2, dropout, full recompute": Case(
        replace(MODEL, dropout=0.1), train=replace(SHORT, recompute=Recompute.full)
    ),
    "gpt2, down alone, selective recompute": Case(
        lora=replace(EVERYWHERE, targets=["down"]),
        train=replace(SHORT, recompute=Recompute.selective),
    ),
    "llama": Case(LLAMA, GATED),
    "llama, query and value": Case(LLAMA, LoraConfig(rank=4)),
    "llama, selective recompute": Case(
        LLAMA, GATED, replace(SHORT, recompute=Recompute.selective)
    ),
}
SPLITS: dict[int, dict[Layout, dict[str, ParallelConfig]]] = {
    4: {
        # Two key/value heads on four ranks.
        (4, 1, 1): {"llama": SPLIT, "llama, query and value": ParallelConfig()},
        (2, 2, 1): {"gpt2": SPLIT, "gpt2, dropout, full recompute": ParallelConfig()},
        (1, 4, 1): {"gpt2": ZERO_BUBBLE},
    },
    8: {
        (2, 2, 2): {
            "gpt2": ParallelConfig(),
            "gpt2, down alone, selective recompute": SPLIT,
            "llama": ZERO_BUBBLE,
            "llama, selective recompute": replace(SPLIT, schedule=Schedule.zero_bubble),
        }
    },
}
