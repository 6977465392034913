"""Gradients over the copies of a model: summed over dp, summed over tied weights, measured.

The gradients live in a few flat buffers, so that an average is a few large messages and the
order of every sum is fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_pt.parallel.groups import Pending, ProcessGroups, all_reduce, start_all_reduce
from slurm_pt.parallel.shard import Shard
from slurm_pt.parallel.weight_gradients import watch_gradient
from slurm_pt.plan.optimizer_state import padded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slurm_pt.parallel.zero import ShardedParameters

BUCKET_BYTES = 25 * 2**20
"""Large enough to be bound by bandwidth, not latency; small enough that most of them are on their
way before the backward pass ends (the same as torch's DDP)."""


class GradientBuckets:
    """The gradients of some parameters as views into few flat buffers, summed while they come.

    Each parameter's `.grad` is such a view from the start and must stay one: begin a step with
    `start_step`, never with `zero_grad(set_to_none=True)`.

    A buffer is on its way as soon as its last gradient of the step is there, while the backward
    pass goes on. How often each gradient is added to in a step is learnt from the first one.

    With `sharding` (ZeRO), whose buckets these then are, a sum arrives on the replica alone that
    owns it: see `owned`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        sharding: ShardedParameters | None = None,
    ):
        self.group, self.sharding = group, sharding
        self.buffers: list[Tensor] = []
        if sharding is None:
            buckets = in_buckets(parameters, bucket_bytes=bucket_bytes)
        else:
            buckets = sharding.buckets
        for members in buckets:
            self._add(members)
        self._added = [0] * len(self.buffers)
        """How many gradients were added in this step, by bucket."""
        self._expected: list[int] | None = None
        self._works: dict[int, Pending | None] = {}

    def start_step(self) -> None:
        """Zero all gradients."""
        for buffer in self.buffers:
            buffer.zero_()
        self._added = [0] * len(self.buffers)

    def owned(self, gradient: Tensor) -> Tensor:
        """What is summed here of a gradient, or of rows of one: all of it, or with ZeRO a part."""
        return gradient if self.sharding is None else self.sharding.owned(gradient)

    def scale(self, factor: float) -> None:
        for buffer in self.buffers:
            self.owned(buffer).mul_(factor)

    def finish_sum(self) -> None:
        """Return when all that is owned here is summed over the group. A collective over it."""
        if self._expected is None:
            self._expected = list(self._added)
        for index in range(len(self.buffers)):
            if index not in self._works:
                self._works[index] = self._start_sum(index)
        for work in self._works.values():
            if work is not None:
                work.wait()
        self._works.clear()

    def _add(self, members: list[nn.Parameter]) -> None:
        index = len(self.buffers)
        buffer, views = flat_views(members, 1 if self.sharding is None else self.group.size())
        for parameter, view in zip(members, views, strict=True):
            parameter.grad = view
        self.buffers.append(buffer)
        if self.group.size() == 1:
            return
        for parameter in members:
            # Autograd says so itself; layers that add to the gradient themselves call the other.
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: self._note(index)
            )
            watch_gradient(parameter, lambda: self._note(index))

    def _note(self, index: int) -> None:
        """A gradient of this bucket was added to."""
        self._added[index] += 1
        if self._expected is not None and self._added[index] == self._expected[index]:
            self._works[index] = self._start_sum(index)

    def _start_sum(self, index: int) -> Pending | None:
        buffer = self.buffers[index]
        if self.sharding is not None:
            return self.sharding.start_sum(buffer)
        return start_all_reduce(buffer, self.group)


def in_buckets(
    parameters: Iterable[nn.Parameter],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    apart: nn.Parameter | None = None,
) -> list[list[nn.Parameter]]:
    """The parameters of each flat buffer, which share one format; `apart` gets one of its own."""
    buckets: list[list[nn.Parameter]] = []
    size_bytes = 0
    # Backward reaches the last parameters first, so they share the first bucket.
    for parameter in reversed(list(parameters)):
        last = buckets[-1][-1] if buckets else None
        fits = size_bytes + parameter.nbytes <= bucket_bytes
        alone = apart is not None and (parameter is apart or last is apart)
        if last is None or not fits or alone or parameter.dtype != last.dtype:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(parameter)
        size_bytes += parameter.nbytes
    return buckets


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


def counts_here(shard: Shard, groups: ProcessGroups, *, owned: bool = False) -> bool:
    """Whether this rank counts a part, so that over all ranks each number counts once.

    Of tensor ranks that hold the same part the first counts; of dp replicas the first too, unless
    what is counted is the part that it alone owns.
    """
    sharing = groups.layout.tp // shard.parts
    return (owned or groups.place.dp_rank == 0) and groups.place.tp_rank % sharing == 0


def squared_norm(gradients: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """The sum of their squares as a float64 scalar: sum it over all ranks for the norm."""
    held = [gradient for gradient in gradients if gradient.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(list(torch._foreach_norm(held)))
    return norms.double().square().sum()


def clip_factor(grad_norm: float, max_norm: float | None) -> float:
    """What to multiply gradients with so that their norm is at most `max_norm`; at most 1.

    Source: torch.nn.utils.clip_grad_norm_, with the same 1e-6 in the denominator.

    >>> clip_factor(0.5, 1.0), clip_factor(7.0, None)
    (1.0, 1.0)
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (grad_norm + 1e-6))
