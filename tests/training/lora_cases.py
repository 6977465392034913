"""What the ranks of the tests of adapters and of shared layers run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slurm_pt.checkpoint.base_model import BaseModel
from slurm_pt.config.choices import Recompute, Schedule
from slurm_pt.config.schema import LoraConfig, ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.layers import NO_LORA
from slurm_pt.training.loop import train_loop
from tests.checkpoint.toy import checkpointer
from tests.training.cases import (
    LLAMA,
    MODEL,
    ONE_F_ONE_B,
    TRAIN,
    build,
    engine_of,
    groups_of,
    train,
)
from tests.training.traffic_cases import counting, planned

if TYPE_CHECKING:
    from pathlib import Path

    from slurm_pt.training.loop import StepRecord
    from slurm_pt.training.rank_model import RankModel

Layout = tuple[int, int, int]
"""(tp, pp, dp)."""
EVERYWHERE = LoraConfig(
    rank=3, alpha=6.0, targets=["query", "key", "value", "attention.output", "up", "down"]
)
GATED = replace(EVERYWHERE, targets=[*EVERYWHERE.targets, "gate"])
SHORT = replace(TRAIN, steps=3, lr=2e-2, warmup_steps=1, grad_clip=0.03)
SPLIT = ParallelConfig(sequence=True)
ZERO_BUBBLE = ParallelConfig(schedule=Schedule.zero_bubble)


@dataclass(frozen=True)
class Case:
    """What is trained, and how its pipeline runs."""

    model: ModelConfig = MODEL
    lora: LoraConfig = EVERYWHERE
    train: TrainConfig = SHORT
    parallel: ParallelConfig = ONE_F_ONE_B


@dataclass(frozen=True)
class Trained:
    """What one rank saw of a run."""

    losses: list[float]
    norms: list[float]
    frozen_bits_are_those_of_the_start: bool
    what_is_frozen_has_no_gradient_and_no_moments: bool
    sent: dict[str, float]
    """Bytes in a step, by purpose."""
    planned: dict[str, float]
    """The same by the formulas."""


SHARED = replace(MODEL, num_layers=8, share_layers=2)
CASES: dict[str, Case] = {
    "gpt2": Case(),
    "gpt2, dropout": Case(replace(MODEL, dropout=0.1)),
    "gpt2, down alone": Case(lora=replace(EVERYWHERE, targets=["down"])),
    "llama": Case(LLAMA, GATED),
    "llama, query and value": Case(LLAMA, LoraConfig(rank=4)),
    "llama, all weights": Case(LLAMA, NO_LORA),
    "shared layers": Case(SHARED, NO_LORA),
    "shared layers, adapters": Case(SHARED),
}


def like(name: str, parallel: ParallelConfig = ONE_F_ONE_B, **train: Any) -> tuple[str, Case]:
    """A case that must give what the named one gives on one process."""
    case = CASES[name]
    return name, replace(case, parallel=parallel, train=replace(case.train, **train))


SPLIT_ZERO_BUBBLE = replace(SPLIT, schedule=Schedule.zero_bubble)
INTERLEAVED = ParallelConfig(schedule=Schedule.interleaved, virtual_stages=2)
SPLITS: dict[int, dict[Layout, list[tuple[str, Case]]]] = {
    4: {
        # Two key/value heads on four ranks.
        (4, 1, 1): [
            like("llama", SPLIT),
            like("llama, query and value"),
            like("llama, all weights", SPLIT),
        ],
        (1, 4, 1): [
            like("gpt2", ZERO_BUBBLE),
            like("shared layers", recompute_stages=[Recompute.full, Recompute.selective] * 2),
        ],
    },
    8: {
        (2, 2, 2): [
            like("gpt2, dropout", recompute=Recompute.full),
            like("gpt2, down alone", SPLIT, recompute=Recompute.selective),
            like("llama", SPLIT_ZERO_BUBBLE, recompute=Recompute.selective),
            like("shared layers", INTERLEAVED),
            like("shared layers, adapters", SPLIT_ZERO_BUBBLE),
        ]
    },
}


def trained(folder: Path, wanted: dict[Layout, list[tuple[str, Case]]]) -> list[Trained]:
    """What each case gives, in each layout, one after another."""
    found = []
    for layout, cases in wanted.items():
        for _, case in cases:
            groups = groups_of(ParallelLayout(*layout), case.model)
            settings = {"parallel": case.parallel, "lora": case.lora}
            fresh = frozen_bits(build(case.model, case.train, groups, **settings))
            with counting(groups) as sent:
                stage, optimizer, records, _ = train(
                    folder, case.model, case.train, groups, **settings
                )
            with_gradient = {n for n, p in stage.named_parameters() if p.grad is not None}
            found.append(
                Trained(
                    [record.loss for record in records],
                    [record.grad_norm for record in records],
                    frozen_bits(stage) == fresh,
                    with_gradient == set(optimizer.parameters) == set(stage.trained_parameters()),
                    {purpose: size / case.train.steps for purpose, size in sent.items()},
                    planned(stage, case.model, case.train, groups, case.parallel, case.lora),
                )
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


def go_on(
    tokens: Path,
    case: Case,
    layout: Layout,
    *,
    folder: Path,
    base: Path | None = None,
    save_at: int | None = None,
) -> list[float]:
    """The losses from the newest checkpoint in `folder` on, or from the start; saves one step."""
    groups = groups_of(ParallelLayout(*layout), case.model)
    engine = engine_of(
        tokens, case.model, case.train, groups, parallel=case.parallel, lora=case.lora
    )
    tensors, shards, _ = engine.stored()
    keeper = checkpointer(folder, groups)
    under = BaseModel(seed=case.train.seed)
    if base is not None:
        weights, places = engine.base()
        under = keeper.load_weights(base, weights, shards=places)
    resumed = keeper.resume(tensors, shards=shards)
    if resumed is not None:
        engine.loaded(resumed.step)
    records: list[StepRecord] = []

    def save(step: int) -> None:
        keeper.save(step, tensors, shards=shards, rank_state={}, common=under.record(), wait=True)

    train_loop(
        engine,
        start_step=0 if resumed is None else resumed.step,
        save_due=lambda: len(records) + 1 == save_at,
        save=save,
        record=records.append,
    )
    groups.close()
    return [record.loss for record in records]


def moves(
    tokens: Path, folder: Path, layouts: list[Layout], save_at: int | None = None
) -> list[list[float]]:
    """The losses of Llama with adapters in each layout, from what is in the folder on."""
    case = CASES["llama"]
    return [go_on(tokens, case, layout, folder=folder, save_at=save_at) for layout in layouts]


def on_a_base(tokens: Path, model: ModelConfig, base: Path, folder: Path) -> None:
    """Two float32 steps of adapters on the weights of a checkpoint, and a save after the first."""
    config = TrainConfig(
        steps=2, global_batch_size=4, micro_batch_size=2, seq_len=12, lr=0.05, seed=4
    )
    go_on(tokens, Case(model, GATED, config), (2, 1, 1), folder=folder, base=base, save_at=1)
