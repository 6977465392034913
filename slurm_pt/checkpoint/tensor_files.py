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

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
from slurm_pt.errors import CheckpointError

INDEX = "tensors.json"

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names that the safetensors format has for number formats."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class Place:
    """Where the bytes of one chunk are."""

    file: str
    start_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, in the coordinates of the whole tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint, whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def tensor_file(rank: int) -> str:
    """Name of the file with the tensors that one rank wrote."""
    return f"rank_{rank:05d}.safetensors"


def read_index(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name.

    Raises:
        CheckpointError: the index is not one, or its chunks do not fill a tensor.
    """
    try:
        content: dict[str, Any] = json.loads((path / INDEX).read_bytes())
        tensors = {name: _parse_stored(entry) for name, entry in content["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX} cannot be used: {error!r}") from None
    for name, stored in tensors.items():
        filled = sum(math.prod(chunk.shape) for chunk in stored.chunks)
        if filled != math.prod(stored.shape):
            raise CheckpointError(
                f"{path / INDEX}: {name} of shape {stored.shape} has {math.prod(stored.shape)} "
                f"elements, its chunks {filled}"
            )
    return tensors


def read_whole(path: Path, stored: StoredTensor) -> Tensor:
    """A tensor of a checkpoint folder, put together by this process alone."""
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        raw = torch.empty(chunk.place.size_bytes, dtype=torch.uint8)
        with (path / chunk.place.file).open("rb", buffering=0) as file:
            file.seek(chunk.place.start_bytes)
            _read_all(file, raw.numpy().data)
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))
        whole[box] = raw.view(stored.dtype).reshape(chunk.shape)
    return whole


def render_index(path: Path, names: Sequence[str]) -> str:
    """The text of `tensors.json` for safetensors files that hold whole tensors."""
    tensors: dict[str, Any] = {}
    for name in names:
        with (path / name).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for tensor, entry in header.items():
            begin, end = entry["data_offsets"]
            chunk = {
                "offsets": [0] * len(entry["shape"]),
                "shape": entry["shape"],
                "file": name,
                "start_bytes": 8 + length + begin,
                "size_bytes": end - begin,
            }
            tensors[tensor] = {"dtype": entry["dtype"], "shape": entry["shape"], "chunks": [chunk]}
    return _render_index(tensors)


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
            name: _render_stored(name, stored, places)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.records[INDEX] = write_file(self.path / INDEX, _render_index(tensors).encode())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, Path)

    def _write_items(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        # Large elements first: then each tensor starts at a multiple of its element size.
        items.sort(key=lambda item: (-_element_bytes(item), item.index.fqn))
        name = tensor_file(self.rank)
        header, places = _lay_out(items, name)
        digest = hashlib.sha256(header)
        with (self.path / name).open("wb", buffering=0) as file:
            _write_all(file, memoryview(header))
            for item in items:
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{item.index.fqn} is not a tensor")
                data = _bytes_of(tensor)
                for start in range(0, len(data), _WRITE_BYTES):
                    # The part that is hashed is still in the processor's cache to be written.
                    # Both let go of the interpreter lock: training goes on meanwhile.
                    part = data[start : start + _WRITE_BYTES]
                    digest.update(part)
                    _write_all(file, part)
            os.fsync(file.fileno())
        size = len(header) + sum(place.size_bytes for place in places)
        self.records[name] = FileRecord(size, digest.hexdigest())
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
        by_file: dict[str, list[tuple[ReadItem, Chunk, torch.dtype]]] = {}
        for item in plan.items:
            chunk, dtype = self.chunks[_key(item.storage_index)]
            by_file.setdefault(chunk.place.file, []).append((item, chunk, dtype))
        for name, wanted in by_file.items():
            wanted.sort(key=lambda entry: entry[1].place.start_bytes)
            with (self.path / name).open("rb", buffering=0) as file:
                for item, chunk, dtype in wanted:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read_box(file, chunk, dtype, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, Path)


def _lay_out(items: Sequence[WriteItem], file: str) -> tuple[bytes, list[Place]]:
    """The header of a safetensors file, and where each tensor will be in the file."""
    entries: dict[str, Any] = {}
    offsets: dict[str, list[int]] = {}
    starts: list[tuple[int, int]] = []
    at = 0
    boxes = Counter(item.index.fqn for item in items)
    for item in items:
        data = _tensor_data(item)
        shape = list(data.chunk.sizes)
        size = math.prod(shape) * data.properties.dtype.itemsize
        name = item.index.fqn
        if boxes[name] > 1:  # a name of its own for each: only the index speaks of the whole
            name += f"[{','.join(map(str, data.chunk.offsets))}]"
        dtype = _NAMES.get(data.properties.dtype)
        if dtype is None:
            raise CheckpointError(f"{name} is {data.properties.dtype}, which cannot be saved")
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        offsets[name] = list(data.chunk.offsets)
        starts.append((at, size))
        at += size
    # Values of __metadata__ are strings by the format's rule. It lets a person put the parts of a
    # tensor together from the files alone.
    entries["__metadata__"] = {"offsets_in_whole_tensor": json.dumps(offsets)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [Place(file, len(header) + start, size) for start, size in starts]


def _read_box(file: BinaryIO, chunk: Chunk, dtype: torch.dtype, item: ReadItem) -> Tensor:
    """The wanted box of a chunk. Only its rows are read, not the whole chunk."""
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    rows = slice(offsets[0], offsets[0] + lengths[0]) if chunk.shape else slice(0, 1)
    row_elements = math.prod(chunk.shape[1:])
    size = (rows.stop - rows.start) * row_elements * dtype.itemsize
    raw = torch.empty(size, dtype=torch.uint8)
    file.seek(chunk.place.start_bytes + rows.start * row_elements * dtype.itemsize)
    _read_all(file, raw.numpy().data)
    if not chunk.shape:
        return raw.view(dtype).reshape(())
    box = raw.view(dtype).reshape(rows.stop - rows.start, *chunk.shape[1:])
    for dim in range(1, len(chunk.shape)):
        box = box.narrow(dim, offsets[dim], lengths[dim])
    return box


def _read_all(file: BinaryIO, target: memoryview) -> None:
    # One read(2) moves 2 GiB at most, and a network file system may give less than asked.
    while len(target):
        count = file.readinto(target)  # type: ignore[attr-defined]  # BinaryIO lacks readinto
        if not count:
            raise CheckpointError(f"{file.name} ends {len(target)} bytes too early")
        target = target[count:]


def _write_all(file: Any, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, not copied when it is contiguous and in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _tensor_data(item: WriteItem) -> Any:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    return item.tensor_data


def _element_bytes(item: WriteItem) -> int:
    itemsize: int = _tensor_data(item).properties.dtype.itemsize
    return itemsize


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _render_stored(
    name: str, stored: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]
) -> dict[str, Any]:
    chunks = []
    for chunk in stored.chunks:
        place: Place = places[MetadataIndex(name, chunk.offsets)]
        chunks.append(
            {
                "offsets": list(chunk.offsets),
                "shape": list(chunk.sizes),
                "file": place.file,
                "start_bytes": place.start_bytes,
                "size_bytes": place.size_bytes,
            }
        )
    dtype = _NAMES[stored.properties.dtype]
    return {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}


def _render_index(tensors: Mapping[str, Any]) -> str:
    return json.dumps({"format_version": 1, "tensors": tensors}, sort_keys=True)


def _parse_stored(entry: Mapping[str, Any]) -> StoredTensor:
    chunks = tuple(
        Chunk(
            tuple(chunk["offsets"]),
            tuple(chunk["shape"]),
            Place(chunk["file"], chunk["start_bytes"], chunk["size_bytes"]),
        )
        for chunk in entry["chunks"]
    )
    return StoredTensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), chunks)
