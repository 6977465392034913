"""torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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
    """DDP in its fastest form: gradients are views of the buckets, no buffers are sent."""
    plain = Decoder(trial.model)
    load(plain, weights)
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = adamw(trial, plain.parameters())
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def step(batch: Tensor) -> float:
        micro_batches = batch.chunk(world_size)[rank].split(trial.micro_batch_size)
        optimizer.zero_grad()
        total = 0.0
        for index, tokens in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:]) / len(micro_batches)
                loss.backward()
            total += loss.item()
        clip_gradients(gradients_of(plain.parameters()), trial.grad_clip)
        optimizer.step()
        return total

    return stepwise(step)
