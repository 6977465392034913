"""slurm_pt's training runtime: its model, its optimizer and its own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.contestants import Done, Train
from benchmarks.trial import layers_by_cost
from slurm_pt.config.choices import Activation, Bias, Norm, Positions
from slurm_pt.config.schema import ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.parallel.groups import create_groups
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.loop import train_loop
from slurm_pt.training.rank_model import RankModel
from slurm_pt.training.step import TrainStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchmarks.reference import Weights
    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights, *, zero: int = 0, compiles: bool = False) -> Train:
    """Everything as `slurm_pt.trainer` builds it, without a run folder, a job or checkpoints."""
    layout = ParallelLayout(tp=trial.layout.tp, pp=trial.layout.pp, dp=trial.layout.dp)
    groups = create_groups(
        layout, rank=dist.get_rank(), device=torch.device("cpu"), timeout_s=600.0
    )
    train_config = _train_config(trial, compiles=compiles)
    model = RankModel(
        _model_config(trial),
        parallel=ParallelConfig(stage_layers=_stage_layers(trial), zero=zero),
        train=train_config,
        groups=groups,
    )
    _load(model, weights, num_heads=trial.model.num_heads)

    def train(batches: Sequence[Tensor], done: Done) -> None:
        dataset: Any = _Batches(batches)
        engine = TrainStep(model, train_config, dataset)
        train_loop(engine, record=lambda record: done(record.loss))

    return train


def _model_config(trial: Trial) -> ModelConfig:
    model = trial.model
    llama = model.family == "llama"
    return ModelConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        vocab_size=model.vocab_size,
        max_seq_len=model.seq_len,
        ffn_hidden_size=model.ffn_size,
        positions=Positions.rotary if llama else Positions.learned,
        norm=Norm.rms if llama else Norm.layer,
        activation=Activation.swiglu if llama else Activation.gelu,
        bias=Bias.none if llama else Bias.all,
        tie_embeddings=False,
    )


def _stage_layers(trial: Trial) -> list[int] | None:
    """Stages of equal cost, as a user of `parallel.stage_layers` sets them."""
    if trial.layout.pp == 1:
        return None
    return [len(layers) for layers in layers_by_cost(trial.model, trial.layout.pp)]


def _train_config(trial: Trial, *, compiles: bool) -> TrainConfig:
    return TrainConfig(
        steps=trial.warmup + trial.steps,
        global_batch_size=trial.global_batch_size,
        micro_batch_size=trial.micro_batch_size,
        seq_len=trial.model.seq_len,
        lr=trial.lr,
        min_lr=trial.lr,
        weight_decay=trial.weight_decay,
        beta1=trial.beta1,
        beta2=trial.beta2,
        eps=trial.eps,
        grad_clip=trial.grad_clip,
        seed=trial.seed,
        compile=compiles,
    )


@torch.no_grad()
def _load(model: RankModel, weights: Weights, *, num_heads: int) -> None:
    """Each rank takes its part of every whole tensor."""
    parameters = dict(model.named_parameters())
    for piece in model.pieces():
        local = piece.of(parameters[piece.parameter])
        whole = _whole(weights, piece.stored, num_heads)
        begin = piece.shard.offsets(local.shape)
        local.copy_(whole[tuple(slice(b, b + n) for b, n in zip(begin, local.shape, strict=True))])


def _whole(weights: Weights, name: str, num_heads: int) -> Tensor:
    """A tensor of ours; query, key and value lie head by head in the reference's fused one."""
    module, _, kind = name.rpartition(".")
    layer, _, part = module.rpartition(".")
    if part not in ("query", "key", "value"):
        return weights[name]
    fused = weights[f"{layer}.qkv.{kind}"].unflatten(0, (num_heads, 3, -1))
    return fused[:, ("query", "key", "value").index(part)].flatten(0, 1)


class _Batches:
    """The trial's batches where the loop expects a `TokenDataset`."""

    def __init__(self, batches: Sequence[Tensor]):
        self.batches = [batch.numpy() for batch in batches]

    mask_documents = False

    def places(self, step: int, indices: range) -> tuple[int, range]:
        return step, indices

    def tokens(self, places: tuple[int, range]) -> Any:
        step, indices = places
        return self.batches[step][indices.start : indices.stop]
