"""Which tensors a rank saves, and what must be the same on which ranks.

Stored names and shapes are those of the whole tensor, the same in every layout: that is what lets
a checkpoint of any (tp, pp, dp) be loaded into any other. A part of a tensor is a contiguous
block along its shard dim, or with ZeRO a range of such a block's numbers: a few boxes. A fused
weight (q, k and v in one) is no such block once it is split, so its parts go in under names of
their own, as views.

What the replicas of the model differ in (weights between two synchronisations, the errors of
compressed gradients) is stored for each rank, whole, under names with its number.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from slurm_pt.checkpoint.tensor_index import StoredTensor
from slurm_pt.parallel.shard import WHOLE, Fragment, Shard
from slurm_pt.plan.layout import ParallelLayout, Place

OWN = "own/"
"""What the stored names of all tensors begin with that belong to one rank alone."""


def names_to_save(
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, Shard],
    *,
    layout: ParallelLayout,
    place: Place,
) -> list[str]:
    """The tensors that this rank writes, so that each is written once and the load is even.

    So the copy to host memory (the time that training stands still) and its memory are divided by
    dp. All ranks of a pipeline stage must hold the same names; see `fingerprint`.
    """
    load = {(tp, dp): 0 for dp in range(layout.dp) for tp in range(layout.tp)}
    sizes = {name: _bytes_of_part(tensor, shards.get(name)) for name, tensor in tensors.items()}
    mine = []
    for name in sorted(tensors, key=lambda name: (-sizes[name], name)):
        size = sizes[name]
        shard = shards.get(name, WHOLE)
        if shard.split:
            # All parts from one copy of the model; parts are of one size. Of tensor ranks that
            # hold the same part, the first writes it.
            dp_rank = min(range(layout.dp), key=lambda dp: load[0, dp])
            writers = [(tp, dp_rank) for tp in range(0, layout.tp, layout.tp // shard.parts)]
        else:
            writers = [min(load, key=lambda writer: load[writer])]
        if isinstance(shard, Fragment):  # every replica has its own
            writers = [(tp, dp) for tp, _ in writers for dp in range(layout.dp)]
            size //= layout.dp
        for writer in writers:
            load[writer] += size
        nothing = isinstance(shard, Fragment) and not shard.numbers
        if (place.tp_rank, place.dp_rank) in writers and not nothing:
            mine.append(name)
    return mine


def _bytes_of_part(tensor: Tensor, shard: Shard | None) -> int:
    """The same on all replicas, also where each holds only a fragment of the part."""
    if isinstance(shard, Fragment):
        return math.prod(shard.shape) * tensor.element_size()
    return tensor.nbytes


def own_name(rank: int, name: str) -> str:
    """The stored name of a tensor that belongs to one rank alone, or what all of them begin with.

    >>> own_name(3, "model/head.weight")
    'own/00003/model/head.weight'
    """
    return f"{OWN}{rank:05d}/{name}"


def fingerprint(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> str:
    """Equal on ranks that hold the same names, formats, shapes and shards, whichever part of them.

    Whether fragments make up a whole is seen when their places are put together.
    """
    seen = [
        (name, str(tensor.dtype), shard.whole_shape(tensor.shape), shard.dim, shard.parts)
        for name, tensor in sorted(tensors.items())
        for shard in [shards.get(name, WHOLE)]
    ]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def mismatches(
    stored: Mapping[str, StoredTensor],
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, Shard],
    *,
    any_format: bool = False,
) -> list[str]:
    """What keeps a checkpoint from being loaded into these tensors: name, expected, found."""
    problems = []
    for name, tensor in tensors.items():
        shard = shards.get(name, WHOLE)
        expected = shard.whole_shape(tensor.shape)
        found = stored.get(name)
        if found is None:
            problems.append(f"{name}: expected shape {expected}, found nothing")
            continue
        if expected != found.shape:
            problems.append(f"{name}: expected shape {expected}, found {found.shape}")
        if tensor.dtype != found.dtype and not any_format:
            problems.append(f"{name}: expected {tensor.dtype}, found {found.dtype}")
    return problems


class HostBuffers:
    """Host memory that tensors are copied into, kept from one save to the next.

    Fresh memory costs a page fault for every 4 KiB, several times the copy itself; and pinned
    memory, which a GPU can copy to at full speed, takes long to get.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now. Valid until the next call."""
        for name in self._buffers.keys() - tensors.keys():
            del self._buffers[name]
        on_cuda = False
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=True)
            on_cuda = on_cuda or tensor.is_cuda
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        return dict(self._buffers)
