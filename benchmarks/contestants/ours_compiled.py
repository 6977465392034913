"""Our runtime with the kernels between its matrix products made by torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.contestants import Train, ours

if TYPE_CHECKING:
    from benchmarks.reference import Weights
    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """As `ours`, compiled."""
    return ours.build(trial, weights, compiles=True)
