"""The bytes of tensors from and to files, through little memory beside the tensors themselves.

What is read goes straight into the target where it lies there as in the file. All else (a
part of each row, another number format, a GPU's memory) goes through a buffer of BUFFER_BYTES,
whatever the size of the tensor: a rank that loads must fit where a rank that trains does.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from slurm_pt.checkpoint.store import FileRecord
from slurm_pt.checkpoint.tensor_index import Chunk, StoredTensor
from slurm_pt.errors import CheckpointError

BUFFER_BYTES = 16 << 20


class _Piece(NamedTuple):
    """What lies in one chunk of what is wanted."""

    target: Tensor
    chunk: Chunk
    dtype: torch.dtype
    begin: tuple[int, ...]
    """Where it begins in the chunk."""


class BoxReader:
    """Reads boxes of stored tensors of one folder; keeps one buffer."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)  # no memory until it is used

    def read(
        self,
        stored: StoredTensor,
        begin: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
    ) -> Tensor:
        """The box of this shape that begins there, whatever chunks it lies in; or all of it."""
        begin = (0,) * len(stored.shape) if begin is None else begin
        box = torch.empty(stored.shape if shape is None else tuple(shape), dtype=stored.dtype)
        self.fill([(stored, begin, box)])
        return box

    def fill(self, wanted: Iterable[tuple[StoredTensor, Sequence[int], Tensor]]) -> None:
        """Each tensor filled with the box of a stored one that begins there and has its shape.

        Each file is opened once, and read from its start to its end.
        """
        by_file: dict[str, list[_Piece]] = {}
        for stored, begin, target in wanted:
            for piece in _pieces(stored, begin, target):
                by_file.setdefault(piece.chunk.place.file, []).append(piece)
        for name, pieces in by_file.items():
            pieces.sort(key=lambda piece: piece.chunk.place.start_bytes)
            with (self.folder / name).open("rb", buffering=0) as file:
                for piece in pieces:
                    self._fill_piece(piece, file)

    def _fill_piece(self, piece: _Piece, file: BinaryIO) -> None:
        target, chunk, dtype, begin = piece
        if not chunk.shape:
            self._fill(target.reshape(1), file, chunk.place.start_bytes, (1,), dtype, (0,))
        else:
            self._fill(target, file, chunk.place.start_bytes, chunk.shape, dtype, begin)

    def _fill(
        self,
        target: Tensor,
        file: BinaryIO,
        start_bytes: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        begin: Sequence[int],
    ) -> None:
        """The same for an array of this shape that starts at a byte of the file."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        file.seek(start_bytes + begin[0] * row_bytes)
        whole_rows = tuple(target.shape[1:]) == tuple(shape[1:])
        if whole_rows and _lies_as_stored(target, dtype):
            read_all(file, as_bytes(target))
        elif row_bytes > BUFFER_BYTES and len(shape) > 1:
            for row, part in enumerate(target, start=begin[0]):
                at = start_bytes + row * row_bytes
                self._fill(part, file, at, shape[1:], dtype, begin[1:])
        else:
            for part in torch.split(target, max(1, BUFFER_BYTES // row_bytes)):
                raw = self._buffer[: len(part) * row_bytes]
                read_all(file, raw.numpy().data)
                rows = raw.view(dtype).reshape(len(part), *shape[1:])
                for dim in range(1, len(shape)):
                    rows = rows.narrow(dim, begin[dim], target.shape[dim])
                part.copy_(rows)


def _pieces(stored: StoredTensor, begin: Sequence[int], target: Tensor) -> Iterator[_Piece]:
    for chunk in stored.chunks:
        lows = [max(b, o) for b, o in zip(begin, chunk.offsets, strict=True)]
        highs = [
            min(b + n, o + m)
            for b, n, o, m in zip(begin, target.shape, chunk.offsets, chunk.shape, strict=True)
        ]
        if any(low >= high for low, high in zip(lows, highs, strict=True)):
            continue
        inside = tuple(low - offset for low, offset in zip(lows, chunk.offsets, strict=True))
        places = (slice(x - b, y - b) for x, y, b in zip(lows, highs, begin, strict=True))
        yield _Piece(target[tuple(places)], chunk, stored.dtype, inside)


def _lies_as_stored(target: Tensor, dtype: torch.dtype) -> bool:
    return target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_all(file: BinaryIO, target: memoryview) -> None:
    """Fill the target from the file, or raise CheckpointError."""
    # One read(2) moves 2 GiB at most, and a network file system may give less than asked.
    while len(target):
        count = file.readinto(target)  # type: ignore[attr-defined]  # BinaryIO lacks readinto
        if not count:
            raise CheckpointError(f"{file.name} ends {len(target)} bytes too early")
        target = target[count:]


def write_tensors(path: Path, header: bytes, tensors: Iterable[Tensor]) -> FileRecord:
    """A file of the header and the tensors' bytes: on disk on return, hashed while written.

    The tensors are taken one at a time: each may be made when it is asked for.
    """
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:

        def write(data: memoryview) -> None:
            for start in range(0, len(data), BUFFER_BYTES):
                # The part that is hashed is still in the processor's cache to be written.
                # Both let go of the interpreter lock: training goes on meanwhile.
                part = data[start : start + BUFFER_BYTES]
                digest.update(part)
                _write_all(file, part)

        write(memoryview(header))
        for tensor in tensors:
            write(as_bytes(tensor.detach().cpu().contiguous()))
        os.fsync(file.fileno())
        return FileRecord(file.tell(), digest.hexdigest())


def _write_all(file: Any, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]
