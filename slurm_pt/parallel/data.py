"""Gradients over the copies of a model: summed over dp, summed over tied weights, measured.

The gradients live in a few flat buffers, so that an average is a few large messages and the
order of every sum is fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_pt.config.choices import GradientCompression
from slurm_pt.parallel.buckets import BUCKET_BYTES, flat_views, in_buckets
from slurm_pt.parallel.groups import ProcessGroups, all_reduce
from slurm_pt.parallel.powersgd import PowerSGD
from slurm_pt.parallel.reduction import AllReduce, Reduction
from slurm_pt.parallel.shard import Shard
from slurm_pt.parallel.weight_gradients import watch_gradient
from slurm_pt.parallel.zero import ReduceScatter, ShardedParameters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slurm_pt.config.schema import ParallelConfig


class GradientBuckets:
    """The gradients of some parameters as views into few flat buffers, summed while they come.

    Each parameter's `.grad` is such a view from the start and must stay one: begin a step with
    `start_step`, never with `zero_grad(set_to_none=True)`.

    A buffer is on its way as soon as its last gradient of the step is there, while the backward
    pass goes on. How often each gradient is added to in a step is learnt from the first one.

    Args:
        reduction: how buffers are summed; default: plainly.
        sharding: what each replica owns of these parameters. Then that alone is summed here.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        group: dist.ProcessGroup,
        reduction: Reduction | None = None,
        sharding: ShardedParameters | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.group, self.sharding = group, sharding
        plain = AllReduce(group) if sharding is None else ReduceScatter(sharding)
        self.reduction = reduction or plain
        self.buffers: list[Tensor] = []
        if sharding is None:
            buckets = in_buckets(parameters, bucket_bytes=bucket_bytes)
        else:
            buckets = sharding.buckets
        for members in buckets:
            self._add(members)
        self._step, self._alone = 0, False
        self._added = [0] * len(self.buffers)
        """How many gradients were added in this step, by bucket."""
        self._expected: list[int] | None = None
        self._started: set[int] = set()

    def start_step(self, step: int = 0, *, alone: bool = False) -> None:
        """Zero all gradients. `step` steps are done; `alone`: this one's gradients stay here."""
        for buffer in self.buffers:
            buffer.zero_()
        self._step, self._alone = step, alone
        self._added = [0] * len(self.buffers)

    def owned(self, gradient: Tensor) -> Tensor:
        """What is summed here of a gradient, or of rows of one: all of it, or with ZeRO a part."""
        return gradient if self.sharding is None else self.sharding.owned(gradient)

    def scale(self, factor: float) -> None:
        for buffer in self.buffers:
            self.owned(buffer).mul_(factor)

    def finish_sum(self) -> None:
        """Return when all that is owned here is summed over the group. A collective over it.

        At once in a step `alone`.
        """
        if self._expected is None:
            self._expected = list(self._added)
        if self._alone:
            return
        for index in range(len(self.buffers)):
            if index not in self._started:
                self._start(index)
        self.reduction.finish()
        self._started.clear()

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

    def relearn(self) -> None:
        """Forget how often gradients are added to: from the next step on it is another number."""
        self._expected = None

    def _note(self, index: int) -> None:
        """A gradient of this bucket was added to."""
        if index in self._started:
            raise RuntimeError(
                "a gradient came after its sum over the dp ranks had started: every step must use "
                "the same parameters as often as the first one did"
            )
        self._added[index] += 1
        if self._alone or self._expected is None:
            return
        if self._added[index] == self._expected[index]:
            self._start(index)

    def _start(self, index: int) -> None:
        self._started.add(index)
        self.reduction.start(self._step, index, self.buffers[index])


def make_reduction(
    config: ParallelConfig,
    parameters: Iterable[nn.Parameter],
    *,
    group: dist.ProcessGroup,
    sharding: ShardedParameters | None,
) -> Reduction:
    """How the gradients of these parameters are summed over the group, as configured."""
    if sharding is not None:
        return ReduceScatter(sharding)
    kind = config.gradient_compression
    if kind is GradientCompression.powersgd:
        return PowerSGD(
            in_buckets(parameters),
            group=group,
            rank=config.powersgd_rank,
            start_step=config.powersgd_start_step,
        )
    formats = {GradientCompression.fp16: torch.float16, GradientCompression.bf16: torch.bfloat16}
    return AllReduce(group, formats.get(kind))


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


def counts_here(shard: Shard, groups: ProcessGroups) -> bool:
    """Whether this rank counts a part, so that over all ranks of a replica it counts once.

    Of tensor ranks that hold the same part, the first counts it.
    """
    sharing = groups.layout.tp // shard.parts
    return groups.place.tp_rank % sharing == 0


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
