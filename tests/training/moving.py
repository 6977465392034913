"""What the ranks of test_moving do: a run saved with one schedule goes on with another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.loop import train_loop
from tests.checkpoint.toy import checkpointer
from tests.training.cases import (
    LLAMA,
    MODEL,
    ONE_F_ONE_B,
    PIPELINES,
    TRAIN,
    engine_of,
    groups_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from slurm_pt.checkpoint.checkpointer import Checkpointer
    from slurm_pt.config.schema import ModelConfig, ParallelConfig
    from slurm_pt.training.loop import StepRecord
    from slurm_pt.training.step import TrainStep

ANYWHERE: dict[str, tuple[tuple[int, int, int], ParallelConfig]] = {
    "tp2 pp2 dp2": ((2, 2, 2), ONE_F_ONE_B),
    "one process": ((1, 1, 1), ONE_F_ONE_B),
    "tp4": ((4, 1, 1), ONE_F_ONE_B),
    "pp4": ((1, 4, 1), ONE_F_ONE_B),
    "dp8": ((1, 1, 8), ONE_F_ONE_B),
    "tp2 pp2, interleaved": ((2, 2, 1), PIPELINES["interleaved"]),
    "tp2 pp4, zero bubble": ((2, 4, 1), PIPELINES["zero_bubble"]),
}
"""Saved at the first, loaded at all."""
MODELS = {"gpt2": MODEL, "llama": LLAMA}
"""With tied embeddings; and with fewer key and value heads than the most tensor ranks."""
Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""

ZERO = replace(ONE_F_ONE_B, zero=1)
SHARDED: dict[str, tuple[tuple[int, int, int], ParallelConfig]] = {
    "tp2 dp2, ZeRO": ((2, 1, 2), ZERO),
    "dp4": ((1, 1, 4), ONE_F_ONE_B),
    "dp4, ZeRO": ((1, 1, 4), ZERO),
    "pp2 dp2, interleaved, ZeRO": ((1, 2, 2), replace(PIPELINES["interleaved"], zero=1)),
    "dp2, ZeRO": ((1, 1, 2), ZERO),
    "tp2": ((2, 1, 1), ONE_F_ONE_B),
    "one process": ANYWHERE["one process"],
}
"""The optimizer's state is split over replicas, or is not."""

CONFIG = replace(TRAIN, steps=6, micro_batch_size=1)
SAVED_AT = 3
LAYOUTS: dict[str, tuple[tuple[int, int, int], ParallelConfig]] = {
    "1F1B on 2 ranks": ((1, 2, 2), ONE_F_ONE_B),
    "interleaved on 2 ranks": ((1, 2, 2), PIPELINES["interleaved"]),
    "1F1B on 4 ranks": ((1, 4, 1), ONE_F_ONE_B),
    "zero bubble on 4 ranks": ((1, 4, 1), PIPELINES["zero_bubble"]),
}


def curves_after_moving(folder: Path, tokens: Path) -> dict[str, dict[str, Curve]]:
    """For each layout, its curve without a stop, and after a resume from each layout's save."""
    found: dict[str, dict[str, Curve]] = {name: {} for name in LAYOUTS}
    for name in LAYOUTS:
        found[name]["whole"] = _curve(tokens, name, save_to=folder / name)
    for name in LAYOUTS:
        for saved in LAYOUTS:
            found[name][saved] = _curve(tokens, name, load_from=folder / saved)
    return found


def save_at(folder: Path, tokens: Path, name: str) -> dict[str, Curve]:
    """For each model the curve of an undisturbed run, which is saved on its way."""
    return {
        kind: _curve(tokens, name, model_config=model, save_to=folder / kind)
        for kind, model in MODELS.items()
    }


def go_on_at(folder: Path, tokens: Path, names: list[str]) -> dict[str, dict[str, Curve]]:
    """For each model the rest of that run, in each of these layouts."""
    return {
        kind: {
            name: _curve(tokens, name, model_config=model, load_from=folder / kind)
            for name in names
        }
        for kind, model in MODELS.items()
    }


def kept(folder: Path, tokens: Path, names: list[str]) -> dict[str, bool]:
    """Whether a run that is saved, and loaded where it was saved, goes on bit for bit."""
    found = {}
    for name in names:
        curve = _curve(tokens, name, save_to=folder / name)
        found[name] = curve[SAVED_AT:] == _curve(tokens, name, load_from=folder / name)
    return found


def pass_on(source: Path, folder: Path, tokens: Path, names: list[str]) -> None:
    """Loads a checkpoint in one layout after the other; each saves what the next one loads."""
    for name in names:
        degrees, parallel = SHARDED[name]
        groups = groups_of(ParallelLayout(*degrees))
        engine = engine_of(tokens, MODEL, CONFIG, groups, parallel=parallel)
        step = _load(checkpointer(source, groups), engine)
        _save(folder / name, step, engine)
        groups.close()
        source = folder / name


def _curve(
    tokens: Path,
    name: str,
    *,
    model_config: ModelConfig = MODEL,
    save_to: Path | None = None,
    load_from: Path | None = None,
) -> Curve:
    degrees, parallel = {**LAYOUTS, **ANYWHERE, **SHARDED}[name]
    groups = groups_of(ParallelLayout(*degrees), model_config)
    engine = engine_of(tokens, model_config, CONFIG, groups, parallel=parallel)
    step = 0 if load_from is None else _load(checkpointer(load_from, groups), engine)
    records: list[StepRecord] = []
    train_loop(
        engine,
        start_step=step,
        save_due=lambda: save_to is not None and len(records) == SAVED_AT - 1,
        save=lambda step: _save(save_to, step, engine),
        record=records.append,
    )
    groups.close()
    return [(record.loss, record.grad_norm) for record in records]


def _save(folder: Path | None, step: int, engine: TrainStep) -> None:
    assert folder is not None
    assert step == SAVED_AT
    tensors, shards, _ = engine.stored()
    checkpointer(folder, engine.groups).save(
        step, tensors, shards=shards, rank_state={}, common={}, wait=True
    )


def _load(loader: Checkpointer, engine: TrainStep) -> int:
    tensors, shards, _ = engine.stored()
    resumed = loader.resume(tensors, shards=shards)
    assert resumed is not None
    engine.loaded(resumed.step)
    return resumed.step
