"""torch's DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants.accumulation import train_share
from benchmarks.reference import Decoder, Weights, load

if TYPE_CHECKING:
    from benchmarks.contestants import Train
    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """DDP in its fastest form: gradients are views of the buckets, no buffers are sent."""
    plain = Decoder(trial.model)
    load(plain, weights)
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True, broadcast_buffers=False)
    return train_share(trial, model, before_last=model.no_sync)
