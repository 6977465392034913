"""A rank's part of a whole tensor, as torch.distributed.checkpoint (DCP) takes it.

A DTensor would do, but making one imports torch._dynamo, for seconds that a preempted job does not
have. Importing this module imports DCP (2 s): import it where it is needed.
"""

from __future__ import annotations

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
    """A contiguous part along one dim. Its methods are those that DCP asks of a DTensor."""

    tensor: Tensor
    whole: torch.Size
    offsets: torch.Size

    @classmethod
    def of(cls, tensor: Tensor, shard: Shard) -> Block:
        """The block that a rank's part is."""
        whole, offsets = shard.whole_shape(tensor.shape), shard.offsets(tensor.shape)
        return cls(tensor, torch.Size(whole), torch.Size(offsets))

    def size(self) -> torch.Size:
        """Of the whole: DCP compares it with what is stored."""
        return self.whole

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=self.__create_chunk_list__()[0],
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=self.whole,
        )
        index = MetadataIndex(fqn, self.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.tensor.shape)]


class BlockSavePlanner(DefaultSavePlanner):
    """DCP's planner, which by itself finds parts in tensors alone."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.tensor if isinstance(found, Block) else super().lookup_object(index)


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
        return found.tensor if isinstance(found, Block) else super().lookup_tensor(index)
