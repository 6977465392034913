"""What the ranks of the training tests run."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slurm_pt.config.choices import Activation, Bias, DType, Norm, Positions, Recompute, Schedule
from slurm_pt.config.schema import LoraConfig, ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.parallel.groups import ProcessGroups, create_groups
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.data import TokenDataset
from slurm_pt.training.layers import NO_LORA
from slurm_pt.training.loop import LoopEnd, StepRecord, train_loop
from slurm_pt.training.optimizer import NamedAdamW
from slurm_pt.training.rank_model import RankModel
from slurm_pt.training.step import TrainStep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = ModelConfig(num_layers=5, hidden_size=16, num_heads=4, vocab_size=256, max_seq_len=16)
TRAIN = TrainConfig(
    steps=30,
    global_batch_size=8,
    micro_batch_size=2,
    seq_len=16,
    lr=4e-3,
    min_lr=1e-3,
    warmup_steps=4,
    grad_clip=1.0,
    dtype=DType.float64,
    seed=5,
)
LLAMA = replace(
    MODEL,
    num_kv_heads=2,
    positions=Positions.rotary,
    norm=Norm.rms,
    activation=Activation.swiglu,
    bias=Bias.qkv,
    tie_embeddings=False,
)


@dataclass(frozen=True)
class Variant:
    """What is trained, and whether tensor ranks split the sequence too."""

    model: ModelConfig = MODEL
    train: TrainConfig = TRAIN
    sequence: bool = False
    lora: LoraConfig = NO_LORA


VARIANTS = {
    "tied": Variant(),
    "untied": Variant(replace(MODEL, tie_embeddings=False)),
    "float32": Variant(train=replace(TRAIN, dtype=DType.float32)),
    "dropout": Variant(replace(MODEL, dropout=0.1)),
    "dropout, split sequence": Variant(replace(MODEL, dropout=0.1), sequence=True),
    "llama": Variant(LLAMA),
    "llama, split sequence": Variant(LLAMA, sequence=True),
    "selective recompute": Variant(
        replace(MODEL, dropout=0.1), replace(TRAIN, recompute=Recompute.selective)
    ),
    "llama, selective recompute, split sequence": Variant(
        LLAMA, replace(TRAIN, recompute=Recompute.selective), sequence=True
    ),
    "full recompute": Variant(
        replace(MODEL, dropout=0.1), replace(TRAIN, recompute=Recompute.full)
    ),
    # 8 samples in micro-batches of 4: two for a pipeline of four, one for a dp2 pipeline of two.
    "few micro-batches": Variant(train=replace(TRAIN, micro_batch_size=4)),
}


ONE_F_ONE_B = ParallelConfig()
"""What `build` needs of it: tp, pp and dp come from the groups."""
PIPELINES = {
    "interleaved": ParallelConfig(schedule=Schedule.interleaved, virtual_stages=2),
    "zero_bubble": ParallelConfig(schedule=Schedule.zero_bubble),
    "uneven interleaved": ParallelConfig(
        schedule=Schedule.interleaved, virtual_stages=2, stage_layers=[1, 2, 1, 1]
    ),
}
"""Names of variants (of the tied model) for layouts with two stages."""


def never() -> bool:
    return False


def ignore(_: Any) -> None:
    """Takes anything, does nothing."""


def groups_of(layout: ParallelLayout, model: ModelConfig = MODEL) -> ProcessGroups:
    return create_groups(
        layout,
        rank=dist.get_rank(),
        device=torch.device("cpu"),
        timeout_s=120.0,
        kv_heads=model.kv_heads,
    )


def build(
    model: ModelConfig,
    train: TrainConfig,
    groups: ProcessGroups,
    parallel: ParallelConfig = ONE_F_ONE_B,
    lora: LoraConfig = NO_LORA,
) -> RankModel:
    return RankModel(model, parallel=parallel, train=train, groups=groups, lora=lora)


def dataset_of(folder: Path, model: ModelConfig, config: TrainConfig) -> TokenDataset:
    return TokenDataset(
        folder,
        seq_len=config.seq_len,
        global_batch_size=config.global_batch_size,
        vocab_size=model.vocab_size,
        seed=config.seed,
    )


def engine_of(
    folder: Path,
    model: ModelConfig,
    config: TrainConfig,
    groups: ProcessGroups,
    *,
    parallel: ParallelConfig = ONE_F_ONE_B,
    lora: LoraConfig = NO_LORA,
) -> TrainStep:
    rank_model = build(model, config, groups, parallel, lora)
    return TrainStep(rank_model, config, dataset_of(folder, model, config))


def train(
    folder: Path,
    model: ModelConfig,
    config: TrainConfig,
    groups: ProcessGroups,
    *,
    parallel: ParallelConfig = ONE_F_ONE_B,
    lora: LoraConfig = NO_LORA,
    stop_requested: Callable[[], bool] = never,
) -> tuple[RankModel, NamedAdamW, list[StepRecord], LoopEnd]:
    """A run from the start: the stage and optimizer as they end, its records and its end."""
    engine = engine_of(folder, model, config, groups, parallel=parallel, lora=lora)
    records: list[StepRecord] = []
    end = train_loop(engine, stop_requested=stop_requested, record=records.append)
    return engine.model, engine.optimizer, records, end


def records_of(
    folder: Path, model: ModelConfig, config: TrainConfig, parallel: ParallelConfig
) -> list[tuple[float, float]]:
    """Losses and norms at tp2 dp2."""
    groups = groups_of(ParallelLayout(2, 1, 2), model)
    _, _, records, _ = train(folder, model, config, groups, parallel=parallel)
    groups.close()
    return [(record.loss, record.grad_norm) for record in records]


Curve = tuple[list[float], list[float]]
"""Losses and gradient norms of a run."""


def curves(
    folder: Path, wanted: dict[tuple[int, int, int], list[str]]
) -> dict[tuple[int, int, int], dict[str, Curve]]:
    """What each wanted variant gives in each layout (tp, pp, dp)."""
    found: dict[tuple[int, int, int], dict[str, Curve]] = {}
    for layout, names in wanted.items():
        found[layout] = {}
        for name in names:
            variant = VARIANTS.get(name, Variant())
            groups = groups_of(ParallelLayout(*layout), variant.model)
            parallel = PIPELINES.get(name, ParallelConfig(sequence=variant.sequence))
            _, _, records, _ = train(
                folder, variant.model, variant.train, groups, parallel=parallel
            )
            found[layout][name] = [r.loss for r in records], [r.grad_norm for r in records]
            groups.close()
    return found


def stops(folder: Path, layout: tuple[int, int, int], runs: int) -> list[tuple[int, int, bool]]:
    """For each run: (the step at which a flag was first raised, this rank's end).

    In each run one random rank, in every third run two ranks, raise their flag when asked for
    the n-th time.
    """
    groups = groups_of(ParallelLayout(*layout))
    config = replace(TRAIN, steps=5)
    found = []
    for run in range(runs):
        draw = random.Random(run)  # the same on all ranks
        raised = {
            draw.randrange(groups.layout.world_size): draw.randint(1, config.steps)
            for _ in range(2 if run % 3 == 0 else 1)
        }
        asked = iter(range(1, config.steps + 1))

        def stop_requested() -> bool:
            return next(asked) >= raised.get(groups.rank, config.steps + 1)  # noqa: B023

        *_, end = train(folder, MODEL, config, groups, stop_requested=stop_requested)
        found.append((min(raised.values()), end.step, end.stopped))
    groups.close()
    return found


def state_of(stage: RankModel, optimizer: NamedAdamW) -> dict[str, torch.Tensor]:
    moments = {
        f"{kind}/{name}": moment
        for kind, held in optimizer.state().items()
        for name, moment in held.items()
    }
    return {**dict(stage.named_parameters()), **moments}


def resumes(folder: Path, layout: tuple[int, int, int]) -> dict[str, bool]:
    """Whether a run that is repeated, and one that is saved and goes on, equal the first one.

    With dropout, and with weights and moments copied into a fresh model and optimizer.
    """
    groups = groups_of(ParallelLayout(*layout))
    model, config = replace(MODEL, dropout=0.1), replace(TRAIN, steps=6)
    saved: dict[str, torch.Tensor] = {}
    saved_at: list[int] = []

    def save(step: int, stage: RankModel, optimizer: NamedAdamW) -> None:
        saved_at.append(step)
        tensors = state_of(stage, optimizer)
        saved.update({name: value.detach().clone() for name, value in tensors.items()})

    whole = _run(folder, model, config, groups, save=save, save_at=3)
    again = _run(folder, model, config, groups)
    rest = _run(folder, model, config, groups, start_step=saved_at[0], saved=saved)
    copies = copies_are_equal(whole.stage, groups)
    groups.close()
    return {
        "saved once, after step 3": saved_at == [3],
        "repeated": whole.curve == again.curve,
        "resumed": whole.curve[3:] == rest.curve,
        "weights": all(
            torch.equal(value, state_of(rest.stage, rest.optimizer)[name])
            for name, value in state_of(whole.stage, whole.optimizer).items()
        ),
        "copies": copies,
    }


@dataclass(frozen=True)
class Run:
    stage: RankModel
    optimizer: NamedAdamW
    curve: list[tuple[int, float, float, float]]


def _run(
    folder: Path,
    model: ModelConfig,
    config: TrainConfig,
    groups: ProcessGroups,
    *,
    save: Callable[[int, RankModel, NamedAdamW], None] | None = None,
    save_at: int = 0,
    start_step: int = 0,
    saved: dict[str, torch.Tensor] | None = None,
) -> Run:
    engine = engine_of(folder, model, config, groups)
    stage, optimizer = engine.model, engine.optimizer
    if saved is not None:
        with torch.no_grad():
            for name, value in state_of(stage, optimizer).items():
                value.copy_(saved[name])
        optimizer.set_step(start_step)
    records: list[StepRecord] = []
    asked = iter(range(1, config.steps + 1))

    def save_due() -> bool:
        return next(asked) == save_at

    train_loop(
        engine,
        start_step=start_step,
        save_due=save_due,
        save=ignore if save is None else lambda step: save(step, stage, optimizer),
        record=records.append,
    )
    return Run(stage, optimizer, [(r.step, r.loss, r.grad_norm, r.lr) for r in records])


def copies_are_equal(stage: RankModel, groups: ProcessGroups) -> bool:
    """Whether both copies of the tied embedding hold the same bits (True on other ranks)."""
    tied = stage.tied_parameter()
    if tied is None or groups.embedding is None:
        return True
    held = [torch.empty_like(tied) for _ in range(2)]
    dist.all_gather(held, tied.detach(), group=groups.embedding)
    return torch.equal(held[0], held[1])


def full_parameters(layouts: list[tuple[int, int, int]]) -> list[dict[str, str]]:
    """In each layout, a hash of each parameter of the whole model, by its stored name."""
    found = []
    for layout in layouts:
        groups = groups_of(ParallelLayout(*layout))
        stage = build(MODEL, TRAIN, groups)
        parameters = dict(stage.named_parameters())
        hashes = {}
        for piece in stage.pieces():
            local = piece.of(parameters[piece.parameter].detach()).contiguous()
            parts = [torch.empty_like(local) for _ in range(groups.layout.tp)]
            dist.all_gather(parts, local, group=groups.tp)
            shard = piece.shard
            if shard.split:  # one of the ranks that hold the same part
                parts = parts[:: groups.layout.tp // shard.parts]
            full = torch.cat(parts, shard.dim) if shard.split else parts[0]
            digest = hashlib.sha256(full.numpy().tobytes()).hexdigest()
            assert hashes.setdefault(piece.stored, digest) == digest
        found.append(hashes)
        groups.close()
    return found


def step_times(folder: Path, layouts: list[tuple[int, int, int]]) -> list[list[float]]:
    """Seconds of each step in each layout, as measured on this rank."""
    found = []
    for layout in layouts:
        groups = groups_of(ParallelLayout(*layout))
        _, _, records, _ = train(folder, MODEL, TRAIN, groups)
        found.append([record.step_s for record in records])
        groups.close()
    return found
