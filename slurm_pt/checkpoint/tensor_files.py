"""How torch.distributed.checkpoint (DCP) puts our tensors on disk, without pickle.

DCP plans who writes what and who reads what; this is its storage. Its own FileSystemWriter is not
used because its index `.metadata` is a pickle which torch loads with plain `pickle.load`
(FileSystemReader.read_metadata, torch 2.13): whoever can write to the folder could run code in the
next attempt. Here the tensors are in safetensors files, one for each rank that has something to
write, and the index is `tensors.json`. Both can be read without this package, and no part of either
can carry code. DCP also uses `torch.load(weights_only=False)` for entries that are not tensors
(DefaultLoadPlanner.load_bytes); an index of ours has none, so that is never reached.

Importing this module imports DCP, which takes about 2 s: import it where it is needed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from slurm_pt.checkpoint.store import FileRecord, write_file
from slurm_pt.checkpoint.tensor_bytes import BoxReader, write_tensors
from slurm_pt.checkpoint.tensor_index import (
    INDEX,
    Chunk,
    Place,
    StoredTensor,
    TensorKind,
    lay_out,
    render_index,
    tensor_file,
)
from slurm_pt.errors import CheckpointError


class TensorFileWriter(StorageWriter):
    """DCP's storage for saving into one folder: fsynced, with checksums taken while writing.

    After the save, `records` has the files that this rank wrote.
    """

    def __init__(self, path: Path, rank: int):
        self.path, self.rank = path, rank
        self.records: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        foreign = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if foreign:
            raise CheckpointError(f"only tensors can be saved, not {', '.join(foreign)}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write_items(list(plan.items), planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; DCP calls this on one rank, when all have written."""
        places = {result.index: result.storage_data for part in results for result in part}
        tensors = {
            name: _stored(name, stored, places)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.records[INDEX] = write_file(self.path / INDEX, render_index(tensors).encode())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, Path)

    def _write_items(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        # Large elements first: then each tensor starts at a multiple of its element size.
        items.sort(key=lambda item: (-_element_bytes(item), item.index.fqn))
        name = tensor_file(self.rank)
        header, places = _lay_out(items, name)
        self.records[name] = write_tensors(self.path / name, header, _resolve(items, planner))
        return [
            WriteResult(index=item.index, size_in_bytes=place.size_bytes, storage_data=place)
            for item, place in zip(items, places, strict=True)
        ]


class TensorFileReader(StorageReader):
    """DCP's storage for loading from one folder; `index` is what `read_index` gave."""

    def __init__(self, path: Path, index: Mapping[str, StoredTensor]):
        self.path = path
        self.tensors = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=stored.dtype),
                size=torch.Size(stored.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
                    for chunk in stored.chunks
                ],
            )
            for name, stored in index.items()
        }
        self.chunks = {
            (name, chunk.offsets): (chunk, stored.dtype)
            for name, stored in index.items()
            for chunk in stored.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return Metadata(state_dict_metadata=dict(self.tensors))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reader = BoxReader(self.path)
        by_file: dict[str, list[tuple[ReadItem, Chunk, torch.dtype]]] = {}
        for item in plan.items:
            chunk, dtype = self.chunks[_key(item.storage_index)]
            by_file.setdefault(chunk.place.file, []).append((item, chunk, dtype))
        for name, wanted in by_file.items():
            wanted.sort(key=lambda entry: entry[1].place.start_bytes)
            with (self.path / name).open("rb", buffering=0) as file:
                for item, chunk, dtype in wanted:
                    target = planner.resolve_tensor(item).detach()
                    reader.fill(target, file, chunk, dtype, item.storage_offsets)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, Path)


def _resolve(items: list[WriteItem], planner: SavePlanner) -> Iterator[Tensor]:
    for item in items:
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{item.index.fqn} is not a tensor")
        yield tensor


def _lay_out(items: list[WriteItem], file: str) -> tuple[bytes, list[Place]]:
    kinds, offsets = [], {}
    boxes = Counter(item.index.fqn for item in items)
    for item in items:
        data = _tensor_data(item)
        name, begin = item.index.fqn, list(data.chunk.offsets)
        if boxes[name] > 1:  # a name of its own for each: only the index speaks of the whole
            name += f"[{','.join(map(str, begin))}]"
        kinds.append(TensorKind(name, data.properties.dtype, tuple(data.chunk.sizes)))
        offsets[name] = begin
    # It lets a person put the parts of a tensor together from the files alone.
    return lay_out(file, kinds, metadata={"offsets_in_whole_tensor": json.dumps(offsets)})


def _tensor_data(item: WriteItem) -> Any:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    return item.tensor_data


def _element_bytes(item: WriteItem) -> int:
    itemsize: int = _tensor_data(item).properties.dtype.itemsize
    return itemsize


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _stored(
    name: str, stored: TensorStorageMetadata, places: Mapping[MetadataIndex, Place]
) -> StoredTensor:
    chunks = tuple(
        Chunk(tuple(one.offsets), tuple(one.sizes), places[MetadataIndex(name, one.offsets)])
        for one in stored.chunks
    )
    return StoredTensor(stored.properties.dtype, tuple(stored.size), chunks)
