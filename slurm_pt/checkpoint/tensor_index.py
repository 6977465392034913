"""Where each tensor of a checkpoint lies: `tensors.json`, and the headers of safetensors files.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON, padded
with spaces) and the bytes of its tensors: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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

    def require_whole(self, name: str) -> None:
        """Raises CheckpointError unless the chunks have as many numbers as the tensor."""
        filled = sum(math.prod(chunk.shape) for chunk in self.chunks)
        if filled != math.prod(self.shape):
            raise CheckpointError(
                f"{name} of shape {self.shape} has {math.prod(self.shape)} elements, its chunks "
                f"{filled}"
            )


@dataclass(frozen=True)
class TensorKind:
    """What a file's header says of a tensor, but for its place."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def require_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises CheckpointError for a tensor of a format that no file of ours can hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which cannot be saved: convert it to one of {known}"
            )


def tensor_file(rank: int) -> str:
    """Name of the file with the tensors that one rank wrote."""
    return f"rank_{rank:05d}.safetensors"


# tensors.json ------------------------------------------------------------------------------------


def read_index(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name.

    Raises:
        CheckpointError: the index is not one, or its chunks do not fill a tensor.
    """
    try:
        content: dict[str, Any] = json.loads((path / INDEX).read_bytes())
        tensors = {name: _parse_stored(entry) for name, entry in content["tensors"].items()}
        for name, stored in tensors.items():
            stored.require_whole(name)
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        reason = error if isinstance(error, CheckpointError) else repr(error)
        raise CheckpointError(f"{path / INDEX} cannot be used: {reason}") from None
    return tensors


def render_index(tensors: Mapping[str, StoredTensor]) -> str:
    """What `read_index` reads."""
    rendered = {name: _render_stored(stored) for name, stored in tensors.items()}
    return json.dumps({"format_version": 1, "tensors": rendered}, sort_keys=True)


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


def _render_stored(stored: StoredTensor) -> dict[str, Any]:
    chunks = [
        {
            "offsets": list(chunk.offsets),
            "shape": list(chunk.shape),
            "file": chunk.place.file,
            "start_bytes": chunk.place.start_bytes,
            "size_bytes": chunk.place.size_bytes,
        }
        for chunk in stored.chunks
    ]
    return {"dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "chunks": chunks}


# the headers of safetensors files ----------------------------------------------------------------


def lay_out(
    file: str, tensors: Sequence[TensorKind], *, metadata: Mapping[str, str]
) -> tuple[bytes, list[Place]]:
    """The header of a file with these tensors one after another, and where each will be in it."""
    entries: dict[str, Any] = {}
    ends = []
    at = 0
    for tensor in tensors:
        if tensor.name in entries:
            raise CheckpointError(f"two parts of {tensor.name} would be written into one file")
        dtype = _NAMES[tensor.dtype]
        end = at + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        ends.append(end)
        at = end
    text = json.dumps({**entries, "__metadata__": dict(metadata)}).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    sizes = [tensor.size_bytes for tensor in tensors]
    starts = [len(header) + end - size for end, size in zip(ends, sizes, strict=True)]
    return header, [Place(file, *place) for place in zip(starts, sizes, strict=True)]


def read_headers(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor of safetensors files of one folder; each is whole in its file.

    Raises:
        CheckpointError: a file is none, or is cut short.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            tensors |= _read_header(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error!r}") from None
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        kind = TensorKind(name, _DTYPES[entry["dtype"]], shape)
        if end - begin != kind.size_bytes or 8 + length + end > size:
            raise ValueError(f"{name} of shape {shape} is not in bytes {begin} to {end}")
        place = Place(path.name, 8 + length + begin, end - begin)
        tensors[name] = StoredTensor(kind.dtype, shape, (Chunk((0,) * len(shape), shape, place),))
    return tensors
