"""Who talks to whom: the process groups of a rank, and the collectives that skip groups of one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slurm_pt.plan.layout import ParallelLayout, Place


PATIENCE = timedelta(hours=2)
"""How long a rank waits for another in the background at least: one that hashes its share of a
large checkpoint on a slow file system is not lost. One that died is noticed at once."""


@dataclass(frozen=True)
class ProcessGroups:
    """The communicators of one rank and its place in the grid."""

    layout: ParallelLayout
    rank: int
    place: Place
    device: torch.device
    world: dist.ProcessGroup
    tp: dist.ProcessGroup
    """The ranks that share this rank's layers."""
    pp: dist.ProcessGroup
    """The ranks of this rank's pipeline; activations go through it."""
    pp_backward: dist.ProcessGroup
    """The same ranks; gradients go through it."""
    dp: dist.ProcessGroup
    """The ranks that hold the same weights."""
    kv: dist.ProcessGroup
    """The tensor ranks that hold the same key and value heads; this rank alone where each has its
    own."""
    embedding: dist.ProcessGroup | None
    """First and last stage of this rank's pipeline; None on other ranks, and when pp == 1."""
    background: dist.ProcessGroup
    """All ranks over gloo, for checkpoint threads alone: a collective of another thread on a
    group that training uses dead-locks."""

    @property
    def first_stage(self) -> bool:
        """Whether this rank is the first of its pipeline: it holds the first chunk of all."""
        return self.place.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank is the last of its pipeline: it holds the last chunk of all."""
        return self.place.pp_rank == self.layout.pp - 1

    def close(self) -> None:
        """Destroy the groups that `create_groups` made, and leave the default one alone."""
        made = {self.tp, self.pp, self.pp_backward, self.dp, self.kv, self.background}
        if self.embedding is not None:
            made.add(self.embedding)
        for group in made:
            dist.destroy_process_group(group)


def create_groups(
    layout: ParallelLayout,
    *,
    rank: int,
    device: torch.device,
    timeout_s: float,
    kv_heads: int | None = None,
) -> ProcessGroups:
    """This rank's groups. A collective over all ranks, after `init_process_group`.

    Every rank makes every group, in the same order, also those it is not in: new_group
    requires it. Axes of degree 1 share one group of this rank alone, which no peer has to know.
    With fewer `kv_heads` than tensor ranks, neighbours share one.
    """
    world = dist.group.WORLD
    if world is None:
        raise ValueError("torch.distributed is not initialised")
    if world.size() != layout.world_size:
        raise ValueError(f"{layout} needs {layout.world_size} ranks, not {world.size()}")
    timeout = timedelta(seconds=timeout_s)
    alone = dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
    everyone = range(layout.world_size)

    def mine(groups_of_ranks: Iterable[tuple[int, ...]]) -> dist.ProcessGroup | None:
        found = None
        for ranks in dict.fromkeys(groups_of_ranks):  # each once, in the order of its first rank
            group = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                found = group
        return found

    pipelines = [layout.pp_ranks(member) for member in everyone]
    tp = mine([layout.tp_ranks(member) for member in everyone]) if layout.tp > 1 else None
    pp = mine(pipelines) if layout.pp > 1 else None
    pp_backward = mine(pipelines) if layout.pp > 1 else None
    dp = mine([layout.dp_ranks(member) for member in everyone]) if layout.dp > 1 else None
    ends = [(ranks[0], ranks[-1]) for ranks in pipelines]
    sharing = layout.tp // min(layout.tp, kv_heads or layout.tp)
    sharers = [_sharers(layout, member, sharing) for member in everyone]
    kv = mine(sharers) if sharing > 1 else None
    groups = ProcessGroups(
        layout=layout,
        rank=rank,
        place=layout.place(rank),
        device=device,
        world=world,
        tp=tp or alone,
        pp=pp or alone,
        pp_backward=pp_backward or alone,
        dp=dp or alone,
        kv=kv or alone,
        embedding=mine(ends) if layout.pp > 1 else None,
        background=dist.new_group(list(everyone), timeout=max(timeout, PATIENCE), backend="gloo"),
    )
    if device.type == "cuda":
        _connect(groups)
    return groups


def _sharers(layout: ParallelLayout, rank: int, sharing: int) -> tuple[int, ...]:
    """The tensor ranks that hold the same key/value heads as this one, `sharing` of them."""
    ranks = layout.tp_ranks(rank)
    begin = ranks.index(rank) // sharing * sharing
    return ranks[begin : begin + sharing]


def _connect(groups: ProcessGroups) -> None:
    """Make NCCL connect now.

    A batch of sends and receives must not be a group's first operation unless all its ranks take
    part in it (documentation of torch.distributed.batch_isend_irecv).
    """
    pipeline = (groups.pp, groups.pp_backward)
    others = (groups.tp, groups.dp, groups.kv, groups.embedding)
    for group in (groups.world, *pipeline, *others):
        if group is not None:
            all_reduce(torch.zeros(1, device=groups.device), group)


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """The tensor itself, reduced in place over the group; at once for a group of one."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class Pending(Protocol):
    """A collective on its way: what it fills may be read after `wait`."""

    def wait(self) -> Any: ...


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """The sum over the group on its way into the tensor: wait before it is read.

    None, and nothing to wait for, for a group of one.
    """
    if group.size() == 1:
        return None
    work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work


def start_reduce_scatter(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> Pending:
    """The sum over the group on its way into `own`, this rank's part of `whole` along dim 0.

    gloo has no reduce-scatter of its own: torch's is an all-reduce of a copy (torch 2.13), twice
    the bytes. There the parts are exchanged, and each rank sums what is its own.
    """
    if whole.device.type == "cpu":
        return _ExchangedSum(whole, own, group)
    work: Pending = _collective("reduce_scatter_single", "reduce_scatter_tensor")(
        own, whole, group=group, async_op=True
    )
    return work


def start_all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Pending:
    """The parts of all ranks of the group on their way into `whole`, one after another."""
    work: Pending = _collective("all_gather_single", "all_gather_into_tensor")(
        whole, part, group=group, async_op=True
    )
    return work


def _collective(name: str, before: str) -> Any:
    """Torch's function of this name; torch 2.12 and older call it otherwise."""
    return getattr(dist, name, None) or getattr(dist, before)


class _ExchangedSum:
    """A reduce-scatter out of an all-to-all exchange."""

    def __init__(self, whole: Tensor, own: Tensor, group: dist.ProcessGroup):
        self.own, self.parts = own, torch.empty_like(whole).view(group.size(), *own.shape)
        self.work = dist.all_to_all_single(
            self.parts.view_as(whole), whole, group=group, async_op=True
        )

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.parts, dim=0, out=self.own)


def agree(groups: ProcessGroups, flag: bool) -> bool:
    """True on every rank if the flag is set on any rank. A collective over all ranks.

    For start-up and evaluation; the training loop sends its flags with the gradient norm.
    """
    raised = torch.tensor(float(flag), device=groups.device)
    return bool(all_reduce(raised, groups.world, op=dist.ReduceOp.MAX).item())
