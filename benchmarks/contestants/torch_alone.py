"""A plain torch loop in one process; with several ranks, each on its share of the batch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.contestants.accumulation import train_share
from benchmarks.reference import Decoder, Weights, load

if TYPE_CHECKING:
    from benchmarks.contestants import Train
    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """The whole model on each rank; ranks never talk."""
    model = Decoder(trial.model)
    load(model, weights)
    return train_share(trial, model)
