"""A plain torch loop in one process; with several ranks, each on its share of the batch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from benchmarks.contestants import Train, stepwise
from benchmarks.reference import (
    Decoder,
    Weights,
    adamw,
    clip_gradients,
    gradients_of,
    load,
    mean_loss,
)

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """The whole model on each rank; ranks never talk."""
    model = Decoder(trial.model)
    load(model, weights)
    optimizer = adamw(trial, model.parameters())
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def step(batch: Tensor) -> float:
        micro_batches = batch.chunk(world_size)[rank].split(trial.micro_batch_size)
        optimizer.zero_grad()
        total = 0.0
        for tokens in micro_batches:
            loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:]) / len(micro_batches)
            loss.backward()
            total += loss.item()
        clip_gradients(gradients_of(model.parameters()), trial.grad_clip)
        optimizer.step()
        return total

    return stepwise(step)
