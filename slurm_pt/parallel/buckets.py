"""Flat buffers that several parameters, or their gradients, lie in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slurm_pt.plan.optimizer_state import padded

if TYPE_CHECKING:
    from collections.abc import Iterable

BUCKET_BYTES = 25 * 2**20
"""Large enough to be bound by bandwidth, not latency; small enough that most of them are on their
way before the backward pass ends (the same as torch's DDP)."""


def in_buckets(
    parameters: Iterable[nn.Parameter],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    apart: nn.Parameter | None = None,
) -> list[list[nn.Parameter]]:
    """The parameters of each flat buffer, of one format and device; `apart` has one of its own."""
    buckets: list[list[nn.Parameter]] = []
    size_bytes = 0
    # Backward reaches the last parameters first, so they share the first bucket.
    for parameter in reversed(list(parameters)):
        last = buckets[-1][-1] if buckets else None
        fits = size_bytes + parameter.nbytes <= bucket_bytes
        alone = apart is not None and (parameter is apart or last is apart)
        if last is None or not fits or alone or _kind(parameter) != _kind(last):
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(parameter)
        size_bytes += parameter.nbytes
    return buckets


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def flat_views(parameters: list[nn.Parameter], parts: int = 1) -> tuple[Tensor, list[Tensor]]:
    """A zeroed buffer of `parts` equal parts, and a view into it for each parameter."""
    total = sum(parameter.numel() for parameter in parameters)
    first = parameters[0]
    buffer = torch.zeros(padded(total, parts), dtype=first.dtype, device=first.device)
    views, offset = [], 0
    for parameter in parameters:
        views.append(buffer[offset : offset + parameter.numel()].view_as(parameter))
        offset += parameter.numel()
    return buffer, views
