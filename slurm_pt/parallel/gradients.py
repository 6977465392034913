"""The gradients of all that a rank holds, from a zeroed buffer to a clipped sum.

One object for our trainer and for a loop of the user's own: it knows which gradients are to be
summed over which ranks, and which of them count in the norm.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from slurm_pt.parallel.data import (
    GradientBuckets,
    clip_factor,
    counts_here,
    squared_norm,
    sum_gradients,
    sum_tied_gradient,
)
from slurm_pt.parallel.groups import ProcessGroups, all_reduce

if TYPE_CHECKING:
    from slurm_pt.parallel.model_part import ModelPart


class Gradients:
    """Each parameter's `.grad` is a view into a buffer of this object."""

    def __init__(self, model: ModelPart, groups: ProcessGroups):
        self.model, self.groups = model, groups
        trained = [p for _, p in model.named_parameters() if p.requires_grad]
        self.buckets = GradientBuckets(trained, group=groups.dp)
        self._views = [(parameter, parameter.grad) for parameter in trained]
        self._num_microbatches = 0
        self.counted, self.copies = _counted_gradients(model, groups)

    def start_step(self, num_microbatches: int) -> None:
        """Zero all gradients; those that `zero_grad` took away are there again."""
        if num_microbatches != self._num_microbatches:
            self.buckets.relearn()
            self._num_microbatches = num_microbatches
        for parameter, view in self._views:
            parameter.grad = view
        self.buckets.start_step()

    def finish(self) -> None:
        """Return when each gradient is the sum of all its terms on all ranks. Collective."""
        self.buckets.finish_sum()
        partial = self.model.partial_gradients()
        sum_gradients([p.grad for p in partial if p.grad is not None], self.groups.tp)
        sum_gradients(self.model.shared_gradients(), self.groups.kv)
        sum_tied_gradient(self.model.tied_parameter(), self.groups)

    def square(self) -> Tensor:
        """This rank's share of the squared norm, float64: the sum over all ranks is the whole."""
        device = self.groups.device
        square = squared_norm(self.counted, device=device)
        # 0 times a number is 0, but for those that are not finite: they spoil the sum.
        return square + 0.0 * squared_norm(self.copies, device=device)

    def norm(self) -> float:
        """The norm over the whole model, the same on all ranks. Collective."""
        return math.sqrt(all_reduce(self.square(), self.groups.world).item())

    def scale(self, factor: float) -> None:
        self.buckets.scale(factor)

    def clip(self, max_norm: float | None) -> float:
        """The norm before it was brought down to `max_norm`. Collective."""
        norm = self.norm()
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            self.scale(factor)
        return norm


def _counted_gradients(
    model: ModelPart, groups: ProcessGroups
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that this rank counts in the norm, and those a tensor rank counts for it.

    Views into the buckets. A tied copy counts nowhere: the embedding on the first stage has the
    same gradient.
    """
    parameters, tied = dict(model.named_parameters()), model.tied_copies()
    counted, copies = [], []
    for piece in model.pieces():
        gradient = parameters[piece.parameter].grad
        if gradient is None or piece.parameter in tied:
            continue
        if counts_here(piece.shard, groups):
            counted.append(piece.of(gradient))
        elif groups.place.dp_rank == 0:
            copies.append(piece.of(gradient))
    return counted, copies
