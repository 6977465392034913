"""A rank's part of a whole tensor, as torch.distributed.checkpoint (DCP) takes it.

A DTensor would do, but making one imports torch._dynamo, for seconds that a preempted job does not
have. Importing this module imports DCP (2 s): import it where it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from slurm_pt.parallel.shard import Shard


@dataclass(frozen=True)
class Block:
    """Some boxes of a whole tensor. Its methods are those that DCP asks of a DTensor."""

    whole: torch.Size
    boxes: Mapping[torch.Size, Tensor]
    """By where they begin in the whole. None: a replica that keeps nothing of this tensor."""

    @classmethod
    def of(cls, tensor: Tensor, shard: Shard) -> Block:
        """What a rank holds; the boxes share the tensor's memory."""
        boxes = shard.boxes(tensor.shape)
        parts = [tensor]
        if len(boxes) != 1:
            parts = list(torch.split(tensor, [math.prod(box.shape) for box in boxes]))
        return cls(
            torch.Size(shard.whole_shape(tensor.shape)),
            {
                torch.Size(box.offsets): part.view(box.shape)
                for box, part in zip(boxes, parts, strict=True)
            },
        )

    def size(self) -> torch.Size:
        """Of the whole: DCP compares it with what is stored."""
        return self.whole

    def at(self, index: MetadataIndex) -> Tensor:
        """The box that DCP means."""
        if index.offset is None:
            raise ValueError(f"{index.fqn} consists of boxes: which one?")
        return self.boxes[index.offset]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.boxes[chunk.offsets]),
                    size=self.whole,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, box.shape) for offsets, box in self.boxes.items()]


class BlockSavePlanner(DefaultSavePlanner):
    """DCP's planner, which by itself finds parts in tensors alone."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.at(index) if isinstance(found, Block) else super().lookup_object(index)


class BlockLoadPlanner(DefaultLoadPlanner):
    """The same for loading."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the state dict as it is: DCP's own would walk through it and rebuild the parts."""
        self.flatten_state_dict = False
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.at(index) if isinstance(found, Block) else super().lookup_tensor(index)
