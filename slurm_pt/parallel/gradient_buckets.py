"""Gradients in a few flat buffers, each summed over the replicas while others are still made.

So that a sum is a few large messages, and the order of every sum is fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_pt.config.choices import GradientCompression
from slurm_pt.parallel.buckets import BUCKET_BYTES, flat_views, in_buckets
from slurm_pt.parallel.powersgd import PowerSGD
from slurm_pt.parallel.reduction import AllReduce, Reduction
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
