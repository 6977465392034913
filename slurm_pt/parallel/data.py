"""Gradients over the copies of a model: summed over dp, summed over tied weights, measured.

The gradients live in a few flat buffers, so that an average is a few large messages and the
order of every sum is fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_pt.parallel.groups import ProcessGroups, all_reduce, start_all_reduce
from slurm_pt.parallel.shard import Shard
from slurm_pt.parallel.weight_gradients import watch_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable

BUCKET_BYTES = 25 * 2**20
"""Large enough to be bound by bandwidth, not latency; small enough that most of them are on their
way before the backward pass ends (the same as torch's DDP)."""


class GradientBuckets:
    """The gradients of some parameters as views into few flat buffers, summed while they come.

    Each parameter's `.grad` is such a view from the start and must stay one: begin a step with
    `start_step`, never with `zero_grad(set_to_none=True)`.

    A buffer is on its way as soon as its last gradient of the step is there, while the backward
    pass goes on. How often each gradient is added to in a step is learnt from the first one.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.group = group
        self.buffers: list[Tensor] = []
        bucket: list[nn.Parameter] = []
        size_bytes = 0
        # Backward reaches the last parameters first, so they share the first bucket.
        for parameter in reversed(list(parameters)):
            if bucket and (
                size_bytes + parameter.nbytes > bucket_bytes or parameter.dtype != bucket[0].dtype
            ):
                self._add(bucket)
                bucket, size_bytes = [], 0
            bucket.append(parameter)
            size_bytes += parameter.nbytes
        if bucket:
            self._add(bucket)
        self._added = [0] * len(self.buffers)
        """How many gradients were added in this step, by bucket."""
        self._expected: list[int] | None = None
        self._works: dict[int, dist.Work | None] = {}

    def start_step(self) -> None:
        """Zero all gradients."""
        for buffer in self.buffers:
            buffer.zero_()
        self._added = [0] * len(self.buffers)

    def scale(self, factor: float) -> None:
        for buffer in self.buffers:
            buffer.mul_(factor)

    def finish_sum(self) -> None:
        """Return when each gradient is its sum over the group. A collective over it."""
        if self._expected is None:
            self._expected = list(self._added)
        for index in range(len(self.buffers)):
            if index not in self._works:
                self._works[index] = start_all_reduce(self.buffers[index], self.group)
        for work in self._works.values():
            if work is not None:
                work.wait()
        self._works.clear()

    def _add(self, members: list[nn.Parameter]) -> None:
        index = len(self.buffers)
        self.buffers.append(_flat_gradients(members))
        if self.group.size() == 1:
            return
        for parameter in members:
            # Autograd says so itself; layers that add to the gradient themselves call the other.
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: self._note(index)
            )
            watch_gradient(parameter, lambda: self._note(index))

    def relearn(self) -> None:
        """Forget how often gradients are added to: from the next step on it is another number."""
        self._expected = None

    def _note(self, index: int) -> None:
        """A gradient of this bucket was added to."""
        if index in self._works:
            raise RuntimeError(
                "a gradient came after its sum over the dp ranks had started: every step must use "
                "the same parameters as often as the first one did"
            )
        self._added[index] += 1
        if self._expected is not None and self._added[index] == self._expected[index]:
            self._works[index] = start_all_reduce(self.buffers[index], self.group)


def sum_tied_gradient(parameter: nn.Parameter | None, groups: ProcessGroups) -> None:
    """Give both copies of a tied embedding the sum of their two gradients.

    Call it on all ranks after the sum over dp, with this rank's copy on the first and the
    last stage (None: nothing is tied). A sum of two terms is the same on both, so copies that
    start bit-equal stay so.
    """
    if groups.embedding is not None and parameter is not None and parameter.grad is not None:
        all_reduce(parameter.grad, groups.embedding)


def sum_gradients(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its sum over the group, in one message. A collective over it."""
    held = list(gradients)
    if group.size() == 1 or not held:
        return
    flat = all_reduce(torch.cat([gradient.flatten() for gradient in held]), group)
    begin = 0
    for gradient in held:
        gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
        begin += gradient.numel()


def counts_here(shard: Shard, groups: ProcessGroups) -> bool:
    """Whether this rank counts a part, so that over all ranks each number counts once.

    Of dp replicas the first counts; of tensor ranks that hold the same part, the first of them.
    """
    sharing = groups.layout.tp // shard.parts
    return groups.place.dp_rank == 0 and groups.place.tp_rank % sharing == 0


def squared_norm(gradients: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """The sum of their squares as a float64 scalar: sum it over all ranks for the norm."""
    held = list(gradients)
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


def _flat_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """One zeroed buffer, with each parameter's `.grad` a view into it."""
    total = sum(parameter.numel() for parameter in parameters)
    buffer = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
    offset = 0
    for parameter in parameters:
        parameter.grad = buffer[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return buffer
