"""What the ranks of test_precision do."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from slurm_pt.config.choices import DType
from slurm_pt.config.schema import ParallelConfig
from slurm_pt.errors import DivergedError
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.loop import StepRecord, train_loop
from slurm_pt.training.loss_scale import LossScale
from tests.training.cases import MODEL, TRAIN, engine_of, groups_of

if TYPE_CHECKING:
    from pathlib import Path

    from slurm_pt.config.schema import TrainConfig
    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.training.rank_model import RankModel

HALF = replace(TRAIN, dtype=DType.float16, steps=7, loss_scale=1024.0, loss_scale_window=3)


def digest(model: RankModel) -> str:
    joined = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(joined).hexdigest()


def _run(
    tokens: Path,
    config: TrainConfig,
    groups: ProcessGroups,
    *,
    bad_step: int,
    bad_rank: int,
    zero: int = 0,
) -> tuple[list[StepRecord], list[str], LossScale]:
    """A run in which one rank's gradient becomes infinite in one step (0: in none)."""
    engine = engine_of(tokens, MODEL, config, groups, parallel=ParallelConfig(zero=zero))
    model = engine.model
    records: list[StepRecord] = []
    weights: list[str] = []

    def record(step: StepRecord) -> None:
        records.append(step)
        weights.append(digest(model))

    def overflows(gradient: torch.Tensor) -> torch.Tensor:
        bad = len(records) == bad_step - 1 and groups.rank == bad_rank
        return gradient * float("inf") if bad else gradient

    norm = next(p for name, p in model.named_parameters() if "norm" in name)
    norm.register_hook(overflows)
    train_loop(engine, record=record)
    return records, weights, engine.loss_scale


def overflow(
    tokens: Path, layout: tuple[int, int, int], zero: int = 0
) -> tuple[list[bool | None], list[float | None], list[str], float]:
    """Skipped, scale and weights of each step, with an overflow in step 3 on rank 3 alone."""
    groups = groups_of(ParallelLayout(*layout))
    records, weights, scale = _run(tokens, HALF, groups, bad_step=3, bad_rank=3, zero=zero)
    groups.close()
    return [r.skipped for r in records], [r.loss_scale for r in records], weights, scale.factor


def diverges(tokens: Path) -> str:
    """What is said about an infinite gradient in float32, on a rank that has none."""
    groups = groups_of(ParallelLayout(2, 1, 1))
    config = replace(TRAIN, dtype=DType.float32, steps=4)
    try:
        _run(tokens, config, groups, bad_step=2, bad_rank=1)
    except DivergedError as error:
        return str(error)
    finally:
        groups.close()
    return "nothing"


def last_losses(tokens: Path, layout: tuple[int, int, int]) -> dict[str, float]:
    """The mean of the last five losses in 16-bit formats, and of three seeds in float32."""
    torch.set_num_threads(1)
    groups = groups_of(ParallelLayout(*layout))
    runs = {
        "bfloat16": replace(TRAIN, dtype=DType.bfloat16),
        "float16": replace(TRAIN, dtype=DType.float16),
        **{
            f"float32, seed {seed}": replace(TRAIN, dtype=DType.float32, seed=seed)
            for seed in (TRAIN.seed, 6, 7)
        },
    }
    found = {}
    for name, config in runs.items():
        records, _, _ = _run(tokens, config, groups, bad_step=0, bad_rank=0)
        found[name] = sum(record.loss for record in records[-5:]) / 5
    groups.close()
    return found
