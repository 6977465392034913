"""slurm_pt's training runtime: its model, its optimizer and its own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.contestants import Done, Train
from slurm_pt.config.schema import ModelConfig, TrainConfig
from slurm_pt.parallel.groups import create_groups
from slurm_pt.plan.layout import ParallelLayout, split_layers
from slurm_pt.training.loop import train_loop
from slurm_pt.training.model import GPTStage
from slurm_pt.training.optimizer import NamedAdamW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchmarks.reference import Weights
    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """Everything as `slurm_pt.worker` builds it, without a run folder, a job or checkpoints."""
    layout = ParallelLayout(tp=trial.layout.tp, pp=trial.layout.pp, dp=trial.layout.dp)
    groups = create_groups(
        layout, rank=dist.get_rank(), device=torch.device("cpu"), timeout_s=600.0
    )
    train_config = _train_config(trial)
    stage = GPTStage(
        _model_config(trial),
        layers=split_layers(trial.model.num_layers, layout.pp)[groups.place.pp_rank],
        first=groups.first_stage,
        last=groups.last_stage,
        groups=groups,
        dtype=train_config.dtype,
        seed=trial.seed,
    )
    _load(stage, weights)
    optimizer = NamedAdamW(dict(stage.named_parameters()), train_config)

    def train(batches: Sequence[Tensor], done: Done) -> None:
        train_loop(
            stage=stage,
            optimizer=optimizer,
            dataset=_Batches(batches),  # type: ignore[arg-type]
            config=train_config,
            groups=groups,
            start_step=0,
            stop_requested=lambda: False,
            save_due=lambda: False,
            save=lambda _step: None,
            record=lambda record: done(record.loss),
            phase=lambda _name: None,
        )

    return train


def _model_config(trial: Trial) -> ModelConfig:
    model = trial.model
    return ModelConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        vocab_size=model.vocab_size,
        max_seq_len=model.seq_len,
        ffn_hidden_size=model.ffn_size,
        tie_embeddings=False,
    )


def _train_config(trial: Trial) -> TrainConfig:
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
    )


@torch.no_grad()
def _load(stage: GPTStage, weights: Weights) -> None:
    """The names, and the order of the fused rows, are the same; each rank takes its shard."""
    tp, tp_rank, dims = stage.groups.layout.tp, stage.groups.place.tp_rank, stage.shard_dims()
    for name, parameter in stage.named_parameters():
        whole, dim = weights[name], dims[name]
        parameter.copy_(whole if dim is None else whole.chunk(tp, dim)[tp_rank])


class _Batches:
    """The trial's batches where the loop expects a `TokenDataset`."""

    def __init__(self, batches: Sequence[Tensor]):
        self.batches = [batch.numpy() for batch in batches]

    def batch(self, step: int, indices: range) -> Any:
        return self.batches[step][indices.start : indices.stop]
