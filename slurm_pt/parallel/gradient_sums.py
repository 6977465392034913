"""Sums of gradients over ranks that hold copies of a parameter, beside the sum over replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_pt.parallel.groups import ProcessGroups, all_reduce

if TYPE_CHECKING:
    from collections.abc import Iterable


def sum_tied_gradient(gradient: Tensor | None, groups: ProcessGroups) -> None:
    """Give both copies of a tied embedding the sum of their two gradients.

    Call it on all ranks after the sum over dp, with the gradient of this rank's copy on the first
    and the last stage (None: nothing is tied), or with the part that the replica owns. A sum of
    two terms is the same on both, so copies that start bit-equal stay so.
    """
    if groups.embedding is not None and gradient is not None and gradient.numel():
        all_reduce(gradient, groups.embedding)


def sum_gradients(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its sum over the group, in one message. A collective over it."""
    held = [gradient for gradient in gradients if gradient.numel()]
    if group.size() == 1 or not held:
        return
    flat = all_reduce(torch.cat([gradient.flatten() for gradient in held]), group)
    begin = 0
    for gradient in held:
        gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
        begin += gradient.numel()
