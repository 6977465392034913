"""The norm of the gradients of a model that is spread over ranks, and what clipping makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurm_pt.parallel.groups import ProcessGroups
from slurm_pt.parallel.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Iterable


def counts_here(shard: Shard, groups: ProcessGroups) -> bool:
    """Whether this rank counts a part, so that over all ranks of a replica it counts once.

    Of tensor ranks that hold the same part, the first counts it.
    """
    sharing = groups.layout.tp // shard.parts
    return groups.place.tp_rank % sharing == 0


def squared_norm(gradients: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """The sum of their squares as a float64 scalar: sum it over all ranks for the norm."""
    held: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            held.setdefault(gradient.device, []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for members in held.values():  # those of an embedding may be in host memory
        norms = torch.stack(list(torch._foreach_norm(members)))
        total += norms.double().square().sum().to(device)
    return total


def clip_factor(grad_norm: float, max_norm: float | None) -> float:
    """What to multiply gradients with so that their norm is at most `max_norm`; at most 1.

    Source: torch.nn.utils.clip_grad_norm_, with the same 1e-6 in the denominator.

    >>> clip_factor(0.5, 1.0), clip_factor(7.0, None)
    (1.0, 1.0)
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (grad_norm + 1e-6))
