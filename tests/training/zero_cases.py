"""What the ranks of test_zero do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurm_pt.config.schema import ParallelConfig
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.plan.optimizer_state import moment_bytes
from tests.training.cases import (
    LLAMA,
    MODEL,
    ONE_F_ONE_B,
    PIPELINES,
    TRAIN,
    Curve,
    groups_of,
    train,
)

if TYPE_CHECKING:
    from pathlib import Path

    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.training.optimizer import NamedAdamW
    from slurm_pt.training.rank_model import RankModel

SHORT = replace(TRAIN, steps=8)
MODELS = {
    "tied": MODEL,
    "one key head": replace(LLAMA, num_kv_heads=1),
    "odd sizes": replace(MODEL, vocab_size=257, ffn_hidden_size=39, tie_embeddings=False),
}


@dataclass(frozen=True)
class Case:
    """A model and how it is split."""

    layout: tuple[int, int, int]
    model: str = "tied"
    parallel: ParallelConfig = ONE_F_ONE_B


SPLIT_SEQUENCE = ParallelConfig(sequence=True)
CASES = {
    "dp2": Case((1, 1, 2)),
    "dp4": Case((1, 1, 4)),
    "dp4, odd sizes": Case((1, 1, 4), "odd sizes"),
    "tp2 dp2": Case((2, 1, 2)),
    "tp2 dp2, split sequence": Case((2, 1, 2), parallel=SPLIT_SEQUENCE),
    "tp2 dp2, one key head": Case((2, 1, 2), "one key head"),
    "tp2 dp2, one key head, split sequence": Case((2, 1, 2), "one key head", SPLIT_SEQUENCE),
    "pp2 dp2": Case((1, 2, 2)),
    "pp2 dp2, interleaved": Case((1, 2, 2), parallel=PIPELINES["interleaved"]),
    "pp2 dp2, zero bubble": Case((1, 2, 2), parallel=PIPELINES["zero_bubble"]),
    "tp2 pp2 dp2": Case((2, 2, 2)),
    "tp2 pp2 dp2, split sequence, zero bubble": Case(
        (2, 2, 2), parallel=replace(PIPELINES["zero_bubble"], sequence=True)
    ),
}


def alone(tokens: Path) -> dict[str, Curve]:
    """The curve of each model in one process, without ZeRO."""
    groups = groups_of(ParallelLayout(1, 1, 1))
    found = {}
    for name, model in MODELS.items():
        _, _, records, _ = train(tokens, model, SHORT, groups)
        found[name] = [r.loss for r in records], [r.grad_norm for r in records]
    groups.close()
    return found


def sharded(tokens: Path, names: list[str]) -> dict[str, tuple[Curve, tuple[int, int]]]:
    """Each case's curve with ZeRO; this rank's bytes of moments, counted and by the formula."""
    found = {}
    for name in names:
        case = CASES[name]
        groups = groups_of(ParallelLayout(*case.layout), MODELS[case.model])
        parallel = replace(case.parallel, zero=1)
        model, optimizer, records, _ = train(
            tokens, MODELS[case.model], SHORT, groups, parallel=parallel
        )
        curve = [r.loss for r in records], [r.grad_norm for r in records]
        found[name] = curve, (_held_bytes(optimizer), _planned_bytes(model, groups))
        groups.close()
    return found


def _held_bytes(optimizer: NamedAdamW) -> int:
    return sum(
        moment.nbytes for moments in optimizer.state().values() for moment in moments.values()
    )


def _planned_bytes(model: RankModel, groups: ProcessGroups) -> int:
    assert model.sharding is not None
    buckets = [sum(p.numel() for p in members) for members in model.sharding.buckets]
    dp, dp_rank = groups.layout.dp, groups.place.dp_rank
    return moment_bytes(buckets, dp=dp, dp_rank=dp_rank, number=8)
