"""slurm_pt's training runtime with the optimizer's state split over the replicas (ZeRO stage 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.contestants import Train, ours

if TYPE_CHECKING:
    from benchmarks.reference import Weights
    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """As `ours`, with `parallel.zero=1`."""
    return ours.build(trial, weights, zero=1)
