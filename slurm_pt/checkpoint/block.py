"""A rank's part of a whole tensor, as torch.distributed.checkpoint (DCP) takes it.

A DTensor would do, but making one imports torch._dynamo, for seconds that a preempted job does not
have. Importing this module imports DCP (2 s): import it where it is needed.
"""

from __future__ import annotations

import math
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

from slurm_pt.parallel.shard import FlatPart, Part


@dataclass(frozen=True)
class Block:
    """A part of a tensor: boxes of the whole, one but for a range of a flat tensor.

    Its methods are those that DCP asks of a DTensor.
    """

    whole: torch.Size
    boxes: dict[torch.Size, Tensor]
    """What the rank holds, by its offsets in the whole."""
    properties: TensorProperties

    @classmethod
    def of(cls, tensor: Tensor, part: Part) -> Block:
        """The block that a rank's part is; it shares the tensor's memory."""
        boxes: dict[torch.Size, Tensor] = {}
        if isinstance(part, FlatPart):
            begin = 0
            for box in part.boxes(tensor.numel()):
                end = begin + math.prod(box.shape)
                boxes[torch.Size(box.offsets)] = tensor[begin:end].view(box.shape)
                begin = end
        else:
            boxes[torch.Size(part.offsets(tensor.shape))] = tensor
        whole = torch.Size(part.whole_shape(tensor.shape))
        return cls(whole, boxes, TensorProperties.create_from_tensor(tensor))

    def size(self) -> torch.Size:
        """Of the whole: DCP compares it with what is stored."""
        return self.whole

    def at(self, index: MetadataIndex) -> Tensor:
        """The box that DCP asks for."""
        if index.offset is None:
            raise ValueError(f"{index.fqn} is held in boxes, and is asked for as a whole")
        return self.boxes[index.offset]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, self.properties, self.whole),
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
