"""The gradients of all that a rank holds, from a zeroed buffer to a clipped sum.

One object for our trainer and for a loop of the user's own: it knows which gradients are to be
summed over which ranks, and which of them count in the norm.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurm_pt.parallel.gradient_buckets import GradientBuckets
from slurm_pt.parallel.gradient_norm import clip_factor, counts_here, squared_norm
from slurm_pt.parallel.gradient_sums import sum_gradients, sum_tied_gradient
from slurm_pt.parallel.groups import ProcessGroups, all_reduce

if TYPE_CHECKING:
    from slurm_pt.parallel.model_part import ModelPart
    from slurm_pt.parallel.reduction import Reduction
    from slurm_pt.parallel.zero import ShardedParameters


class Gradients:
    """Each parameter's `.grad` is a view into a buffer of this object.

    Args:
        reduction: how gradients are summed over the replicas; default: plainly.
        sharding: what this replica owns of the parameters, with ZeRO. Only that is summed here.
    """

    def __init__(
        self,
        model: ModelPart,
        groups: ProcessGroups,
        *,
        reduction: Reduction | None = None,
        sharding: ShardedParameters | None = None,
    ):
        self.groups = groups
        trained = [p for _, p in model.named_parameters() if p.requires_grad]
        self.buckets = GradientBuckets(
            trained, group=groups.dp, reduction=reduction, sharding=sharding
        )
        self._views = [(parameter, parameter.grad) for parameter in trained]
        self._num_microbatches = 0
        # All that follows the sum over the replicas concerns what is owned here alone.
        owned, tied = self.buckets.owned, model.tied_parameter()
        partial = [p.grad for p in model.partial_gradients() if p.grad is not None]
        self._partial = [owned(gradient) for gradient in partial]
        self._shared = [owned(gradient) for gradient in model.shared_gradients()]
        self._tied = None if tied is None or tied.grad is None else owned(tied.grad)
        self._counted, self._copies = self._in_the_norm(model)

    def start_step(self, num_microbatches: int, *, step: int = 0, alone: bool = False) -> None:
        """Zero all gradients; those that `zero_grad` took away are there again.

        `step` steps are done; the gradients of a step `alone` stay those of this replica.
        """
        if num_microbatches != self._num_microbatches:
            self.buckets.relearn()
            self._num_microbatches = num_microbatches
        for parameter, view in self._views:
            parameter.grad = view
        self.buckets.start_step(step, alone=alone)

    def finish(self) -> None:
        """Return when each gradient is the sum of all its terms on all ranks. Collective."""
        self.buckets.finish_sum()
        sum_gradients(self._partial, self.groups.tp)
        sum_gradients(self._shared, self.groups.kv)
        sum_tied_gradient(self._tied, self.groups)

    def squares(self, *, alone: bool = False) -> Tensor:
        """This rank's share of the squared norm, float64 [1]: the sum over all ranks is the whole.

        After a step `alone` each replica has a norm of its own: float64 [dp].
        """
        device, place = self.groups.device, self.groups.place
        norms, own = (self.groups.layout.dp, place.dp_rank) if alone else (1, 0)
        squares = torch.zeros(norms, dtype=torch.float64, device=device)
        if alone or self.buckets.sharding is not None or place.dp_rank == 0:
            # 0 times a number is 0, but for those that are not finite: they spoil the sum.
            spoilt = 0.0 * squared_norm(self._copies, device=device)
            squares[own] = squared_norm(self._counted, device=device) + spoilt
        return squares

    def norm(self) -> float:
        """The norm over the whole model, the same on all ranks. Collective."""
        return math.sqrt(all_reduce(self.squares(), self.groups.world).item())

    def scale(self, factor: float) -> None:
        self.buckets.scale(factor)

    def clip(self, max_norm: float | None) -> float:
        """The norm before it was brought down to `max_norm`. Collective."""
        norm = self.norm()
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            self.scale(factor)
        return norm

    def _in_the_norm(self, model: ModelPart) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that this rank counts in its replica's norm, and those another counts.

        Views into the buckets, of what is owned here. A tied copy counts nowhere: the embedding on
        the first stage has the same gradient.
        """
        parameters, tied = dict(model.named_parameters()), model.tied_copies()
        counted: list[Tensor] = []
        copies: list[Tensor] = []
        for piece in model.pieces():
            gradient = parameters[piece.parameter].grad
            if gradient is None or piece.parameter in tied:
                continue
            kept = counted if counts_here(piece.shard, self.groups) else copies
            kept.append(self.buckets.owned(piece.of(gradient)))
        return counted, copies
