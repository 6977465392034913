"""How layers are split over the tensor group, and where a rank's part lies in the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist

from slurm_pt.parallel.groups import ProcessGroups
from slurm_pt.parallel.shard import Shard
from slurm_pt.parallel.weight_gradients import WeightGradients


@dataclass(frozen=True)
class TensorAxis:
    """How layers are split: over which ranks, and whether the sequence is split between them."""

    tp: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """Not used while tp is 1: a model on one rank needs no torch.distributed."""
    sequence: bool = False
    """Between the blocks each rank holds its part of the sequence."""
    weight_gradients: WeightGradients | None = None
    """Asked by each layer's backward pass whether its weight gradient is to come later."""
    adds_gradients: bool = True
    """Layers add to `.grad` themselves, which saves a pass over memory. False: every gradient goes
    through autograd, where the hooks of other engines see it."""

    @classmethod
    def of(
        cls,
        groups: ProcessGroups,
        *,
        sequence: bool = False,
        weight_gradients: WeightGradients | None = None,
        adds_gradients: bool = True,
    ) -> TensorAxis:
        """The axis of a rank of a job."""
        tp, tp_rank = groups.layout.tp, groups.place.tp_rank
        return cls(tp, tp_rank, groups.tp, sequence, weight_gradients, adds_gradients)

    @property
    def peers(self) -> dist.ProcessGroup:
        if self.group is None:
            raise ValueError("tensor parallelism over several ranks needs their process group")
        return self.group

    @property
    def splits_sequence(self) -> bool:
        return self.sequence and self.tp > 1

    def on_whole_sequence(self) -> TensorAxis:
        """The same ranks, in a place where each has the whole sequence."""
        return replace(self, sequence=False)

    def shard(self, dim: int, parts: int | None = None) -> Shard:
        """This rank's part along a dim."""
        return Shard.over(dim, tp=self.tp, tp_rank=self.rank, parts=parts)

    def own_positions(self, seq_len: int) -> slice:
        """The positions of a sequence that this rank holds between the blocks."""
        if not self.splits_sequence:
            return slice(0, seq_len)
        local = shard_size(seq_len, self.tp)
        return slice(local * self.rank, local * (self.rank + 1))


def shard_size(size: int, parts: int) -> int:
    """One of `parts` equal parts of a dimension."""
    if size % parts:
        raise ValueError(f"{size} cannot be split evenly into {parts} parts")
    return size // parts


@dataclass(frozen=True)
class StoredPart:
    """A piece of a parameter that is stored under a name of its own."""

    name: str
    """Relative to the module that holds the parameter; "../" leads to its parent."""
    rows: slice
    """Of the local parameter, along dim 0."""
    shard: Shard
    """Where these rows lie in the whole tensor of that name."""
