"""What the ranks of the training tests run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_pt.config.schema import DType, ModelConfig, TrainConfig
from slurm_pt.parallel.groups import ProcessGroups, create_groups
from slurm_pt.plan.layout import ParallelLayout, split_layers
from slurm_pt.train.data import TokenDataset
from slurm_pt.train.loop import LoopEnd, StepRecord, train_loop
from slurm_pt.train.model import GPTStage
from slurm_pt.train.optimizer import NamedAdamW

MODEL = ModelConfig(num_layers=5, hidden_size=32, num_heads=4, vocab_size=256, max_seq_len=32)
TRAIN = TrainConfig(
    steps=30,
    global_batch_size=8,
    micro_batch_size=1,
    seq_len=24,
    lr=1e-2,
    min_lr=1e-3,
    warmup_steps=4,
    grad_clip=1.0,
    dtype=DType.float64,
    seed=5,
)


def never() -> bool:
    return False


def ignore(_: Any) -> None:
    """Takes anything, does nothing."""


def groups_of(layout: ParallelLayout) -> ProcessGroups:
    return create_groups(
        layout, rank=dist.get_rank(), device=torch.device("cpu"), timeout_s=120.0
    )


def build(model: ModelConfig, train: TrainConfig, groups: ProcessGroups) -> GPTStage:
    layers = split_layers(model.num_layers, groups.layout.pp)[groups.place.pp_rank]
    return GPTStage(
        model,
        layers=layers,
        first=groups.first_stage,
        last=groups.last_stage,
        groups=groups,
        dtype=train.dtype,
        seed=train.seed,
    )


def train(
    folder: Path,
    model: ModelConfig,
    config: TrainConfig,
    groups: ProcessGroups,
    *,
    stop_requested: Callable[[], bool] = never,
) -> tuple[GPTStage, NamedAdamW, list[StepRecord], LoopEnd]:
    """A run from the start: the stage and optimizer as they end, its records and its end."""
    stage = build(model, config, groups)
    optimizer = NamedAdamW(dict(stage.named_parameters()), config)
    records: list[StepRecord] = []
    end = train_loop(
        stage=stage,
        optimizer=optimizer,
        dataset=TokenDataset(
            folder,
            seq_len=config.seq_len,
            global_batch_size=config.global_batch_size,
            vocab_size=model.vocab_size,
            seed=config.seed,
        ),
        config=config,
        groups=groups,
        start_step=0,
        stop_requested=stop_requested,
        save_due=never,
        save=ignore,
        record=records.append,
        phase=ignore,
    )
    return stage, optimizer, records, end


def curves(
    folder: Path,
    layouts: list[tuple[int, int, int]],
    variants: list[tuple[dict[str, Any], dict[str, Any]]],
) -> list[list[tuple[list[float], list[float]]]]:
    """(losses, gradient norms) of each variant of MODEL and TRAIN in each layout."""
    results = []
    for tp, pp, dp in layouts:
        groups = groups_of(ParallelLayout(tp=tp, pp=pp, dp=dp))
        row = []
        for model, config in variants:
            _, _, records, _ = train(
                folder, replace(MODEL, **model), replace(TRAIN, **config), groups
            )
            row.append(([r.loss for r in records], [r.grad_norm for r in records]))
        results.append(row)
        groups.close()
    return results
