"""A rank's part of a checkpoint's tensors: into a file of its own, and out of the files of all.

Each rank knows by itself which boxes of which tensors it writes, and finds those that it reads in
the index: nothing is planned between ranks. torch.distributed.checkpoint would do, but its import
takes every rank two seconds at each start, it keeps its index as a pickle, and its plan is made on
one rank from the boxes of all.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slurm_pt.checkpoint.store import FileRecord
from slurm_pt.checkpoint.tensor_bytes import BoxReader, write_tensors
from slurm_pt.checkpoint.tensor_index import (
    Chunk,
    StoredTensor,
    TensorKind,
    lay_out,
    tensor_file,
)
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.shard import WHOLE, Box, Shard


class _Part(NamedTuple):
    """A box of a whole tensor, and the memory that a rank has of it."""

    name: str
    box: Box
    tensor: Tensor
    whole: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """What a rank wrote."""

    file: str
    record: FileRecord
    index: dict[str, StoredTensor]
    """The tensors with the chunks that are in this file alone."""


def write_part(
    path: Path, rank: int, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]
) -> Written | None:
    """Writes these tensors, of which the rank holds what their shards say; None: there are none.

    Fsynced, with the checksum taken while writing.
    """
    parts = list(_parts(tensors, shards))
    if not parts:
        return None
    # Large elements first: then each tensor starts at a multiple of its element size.
    parts.sort(key=lambda part: (-part.tensor.element_size(), part.name))
    boxes = Counter(part.name for part in parts)
    kinds, offsets = [], {}
    for name, box, tensor, _ in parts:
        own = name
        if boxes[name] > 1:  # a name of its own for each: only the index speaks of the whole
            own += f"[{','.join(map(str, box.offsets))}]"
        kinds.append(TensorKind(own, tensor.dtype, box.shape))
        offsets[own] = box.offsets
    # It lets a person put the parts of a tensor together from the files alone.
    metadata = {"offsets_in_whole_tensor": json.dumps(offsets)}
    file = tensor_file(rank)
    header, places = lay_out(file, kinds, metadata=metadata)
    record = write_tensors(path / file, header, (part.tensor for part in parts))
    index: dict[str, StoredTensor] = {}
    for (name, box, tensor, whole), place in zip(parts, places, strict=True):
        before = index[name].chunks if name in index else ()
        chunks = (*before, Chunk(box.offsets, box.shape, place))
        index[name] = StoredTensor(tensor.dtype, whole, chunks)
    return Written(file, record, index)


def join_indices(parts: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, from what each rank wrote of them.

    What several pipeline stages wrote alike is taken from the first.

    Raises:
        CheckpointError: ranks do not mean the same tensor by a name, or parts of one are missing.
    """
    joined: dict[str, StoredTensor] = {}
    for part in parts:
        for name, stored in part.items():
            known = joined.setdefault(name, StoredTensor(stored.dtype, stored.shape, ()))
            if (known.dtype, known.shape) != (stored.dtype, stored.shape):
                raise CheckpointError(
                    f"{name} is {known.dtype} of shape {known.shape} on one rank and "
                    f"{stored.dtype} of shape {stored.shape} on another"
                )
            boxes = {(chunk.offsets, chunk.shape) for chunk in known.chunks}
            new = (chunk for chunk in stored.chunks if (chunk.offsets, chunk.shape) not in boxes)
            joined[name] = StoredTensor(known.dtype, known.shape, (*known.chunks, *new))
    for name, stored in joined.items():
        stored.require_whole(name)
    return joined


def read_part(
    path: Path,
    index: Mapping[str, StoredTensor],
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, Shard],
) -> None:
    """Fills these tensors with what their shards say, whatever boxes it was written in.

    Raises:
        CheckpointError: a file ends too early.
    """
    BoxReader(path).fill(
        (index[part.name], part.box.offsets, part.tensor) for part in _parts(tensors, shards)
    )


def _parts(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> Iterator[_Part]:
    for name, tensor in tensors.items():
        shard = shards.get(name, WHOLE)
        held, whole = tensor.detach(), shard.whole_shape(tensor.shape)
        boxes = shard.boxes(tensor.shape)
        if len(boxes) == 1 and boxes[0].shape == tuple(held.shape):
            yield _Part(name, boxes[0], held, whole)
            continue
        sizes = [math.prod(box.shape) for box in boxes]
        for box, part in zip(boxes, torch.split(held, sizes), strict=True):
            yield _Part(name, box, part.view(box.shape), whole)
