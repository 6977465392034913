"""ZeRO stage 1: of each flat buffer a replica owns one part, and keeps the optimizer's state of it.

Gradients are scattered while they are summed, so each replica has the sum of its part alone; it
updates that part, and the updated parts are gathered. A scatter and a gather send what one
all-reduce does. A parameter may lie across the border of two parts: AdamW works number by number.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, sections 5.1 and 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_pt.parallel.buckets import BUCKET_BYTES, flat_views, in_buckets
from slurm_pt.parallel.groups import start_all_gather, start_reduce_scatter
from slurm_pt.plan.optimizer_state import owned_range

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slurm_pt.parallel.groups import Pending


class ShardedParameters:
    """The parameters of one rank as views into flat buffers, of which each replica owns a part.

    The parameter objects stay what they are; their data moves. Make it before anything keeps a
    tensor that shares a parameter's memory.

    Args:
        group: the replicas, `ProcessGroups.dp`.
        apart: a parameter that ranks with other parameters hold too (a tied embedding). It gets a
            buffer of its own, so that all of its holders own the same part of it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        group: dist.ProcessGroup,
        apart: nn.Parameter | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.group = group
        self.buckets = in_buckets(parameters, bucket_bytes=bucket_bytes, apart=apart)
        self.buffers = [_move(members, group.size()) for members in self.buckets]

    def owned(self, view: Tensor) -> Tensor:
        """This replica's part, flat, of a contiguous view into a buffer of weights or gradients.

        The two have the same layout, and each buffer is alone in its storage.
        """
        numel = view.untyped_storage().nbytes() // view.element_size()
        part = owned_range(numel, dp=self.group.size(), dp_rank=self.group.rank())
        begin, end = (
            min(max(border - view.storage_offset(), 0), view.numel())
            for border in (part.start, part.stop)
        )
        return view.detach().view(-1)[begin:end]

    def gather(self) -> None:
        """Return when this replica has the parts that the others updated. A collective."""
        if self.group.size() == 1:
            return
        works = [
            start_all_gather(buffer, self.owned(buffer), self.group) for buffer in self.buffers
        ]
        for work in works:
            work.wait()


class ReduceScatter:
    """A `Reduction` that leaves each replica with the sum of the part that it owns."""

    def __init__(self, sharding: ShardedParameters):
        self._sharding = sharding
        self._pending: list[Pending] = []

    def start(self, step: int, index: int, buffer: Tensor) -> None:  # noqa: ARG002
        group = self._sharding.group
        if group.size() > 1:
            self._pending.append(start_reduce_scatter(buffer, self._sharding.owned(buffer), group))

    def finish(self) -> None:
        for work in self._pending:
            work.wait()
        self._pending.clear()

    def keep(self) -> None:
        """Nothing is remembered."""

    def state(self) -> dict[str, Tensor]:
        return {}


@torch.no_grad()
def _move(members: list[nn.Parameter], dp: int) -> Tensor:
    """A buffer with the parameters' numbers, which become views into it."""
    buffer, views = flat_views(members, dp)
    for parameter, view in zip(members, views, strict=True):
        view.copy_(parameter)
        parameter.data = view
    return buffer
