"""What one forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass on one rank."""

    tokens: Tensor
    """int64 [batch, seq + 1]: inputs and, shifted by one, targets. Empty on stages between."""
    samples: tuple[int, ...]
    """The samples' indices, counted from the start of the run: step * global batch + i."""
    step: int
