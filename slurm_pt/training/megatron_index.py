"""Megatron-LM's indexed datasets, as they are: PREFIX.bin with the ids, PREFIX.idx about them.

    magic           9 bytes      MMIDIDX 0 0
    version         uint64       1
    format of ids   uint8        a key of `FORMATS`
    sequences       uint64
    documents       uint64       one more than there are: the last number below is the end
    sizes           int32 each   tokens of each sequence
    pointers        int64 each   where each sequence begins in PREFIX.bin, in bytes
    documents       int64 each   the sequence each document begins with, and the end

All little endian, no padding. Sequences must follow each other without a gap, as Megatron-LM's
own tools write them: then PREFIX.bin is one row of ids, cut into windows as a token folder is.
Megatron-LM itself shuffles documents before it cuts; so a run here sees other samples of the same
text. The files do not say how large the vocabulary is: ids are compared with the model's as they
are read. numpy only, no torch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slurm_pt.errors import DataError
from slurm_pt.training.byte_file import ByteFile
from slurm_pt.training.sorted_offsets import PIECE, SortedOffsets
from slurm_pt.training.token_source import TokenSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from slurm_pt.training.sorted_offsets import Int64s

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
FORMATS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""numpy's names of the formats of ids, by their code."""
NUMBERS_THAT_ARE_NO_IDS = {6: "float64", 7: "float32"}
AGAIN = "make the dataset again with Megatron-LM's tools/preprocess_data.py"


def index_of(prefix: Path) -> Path:
    """PREFIX.idx; a dot in the prefix is part of its name."""
    return prefix.with_name(f"{prefix.name}.idx")


def tokens_of(prefix: Path) -> Path:
    """PREFIX.bin."""
    return prefix.with_name(f"{prefix.name}.bin")


def open_megatron_index(
    prefix: Path, *, key: str = "data.path", documents: bool = False
) -> TokenSource:
    """The tokens of an indexed dataset; with `documents`, the borders of its documents too.

    Reads the whole index once, in pieces. Raises DataError for files that are missing, cut, of
    another kind, or do not belong together.
    """
    name = f"{key}={prefix}"
    files = []
    for path in (index_of(prefix), tokens_of(prefix)):
        try:
            files.append(ByteFile(path))
        except FileNotFoundError:
            fix = f"copy both PREFIX.idx and PREFIX.bin, or correct {key}"
            raise _refusal(name, f"{path} is missing", fix) from None
    index, tokens = files
    header = _read_header(index, name)
    _check_sequences(index, tokens, header, name)
    size = np.dtype(header.dtype).itemsize
    return TokenSource(
        name=name,
        file=tokens,
        dtype=header.dtype,
        num_tokens=tokens.size_bytes // size,
        vocab_size=None,
        tokenizer=None,
        boundaries=_boundaries(index, header, name) if documents else None,
    )


@dataclass(frozen=True)
class _Header:
    """What stands before the lists of an index, and where the lists begin (bytes)."""

    dtype: str
    sequences: int
    documents: int
    """Numbers in the list of documents."""

    @property
    def pointers_at(self) -> int:
        return HEADER.size + 4 * self.sequences

    @property
    def documents_at(self) -> int:
        return self.pointers_at + 8 * self.sequences

    @property
    def size_bytes(self) -> int:
        return self.documents_at + 8 * self.documents


def _read_header(index: ByteFile, name: str) -> _Header:
    if index.size_bytes < HEADER.size:
        what = f"{index.path} has {index.size_bytes} bytes, fewer than its header: it was cut short"
        raise _refusal(name, what, AGAIN)
    raw = index.read("<u1", count=HEADER.size, offset=0).tobytes()
    magic, version, code, sequences, documents = HEADER.unpack(raw)
    if magic != MAGIC:
        what = f"{index.path} begins with {magic!r}, not with {MAGIC!r}"
        raise _refusal(name, what, f"{AGAIN}: it is of another kind, or damaged")
    if version != VERSION:
        what = f"{index.path} has version {version}, and only {VERSION} is known"
        raise _refusal(name, what, AGAIN)
    if code not in FORMATS:
        found = NUMBERS_THAT_ARE_NO_IDS.get(code, "unknown")
        known = ", ".join(f"{key} ({np.dtype(dtype)})" for key, dtype in FORMATS.items())
        what = f"{index.path} says that ids have the format {code} ({found}), none of {known}"
        raise _refusal(name, what, AGAIN)
    header = _Header(FORMATS[code], sequences, documents)
    if index.size_bytes != header.size_bytes:
        what = (
            f"{index.path} has {index.size_bytes} bytes, where {sequences} sequences and "
            f"{documents} document numbers need {header.size_bytes}: it was cut short, or has "
            "more than text (modes)"
        )
        raise _refusal(name, what, f"copy the file again, or {AGAIN}")
    return header


def _check_sequences(index: ByteFile, tokens: ByteFile, header: _Header, name: str) -> None:
    """Refuses sequences that lie outside of the file of ids, or do not follow each other."""
    size = np.dtype(header.dtype).itemsize
    end = 0
    for start in range(0, header.sequences, PIECE):
        count = min(PIECE, header.sequences - start)
        sizes = index.read("<i4", count=count, offset=HEADER.size + 4 * start).astype(np.int64)
        pointers = index.read("<i8", count=count, offset=header.pointers_at + 8 * start)
        outside = (sizes < 0) | (pointers < 0) | (pointers > tokens.size_bytes - sizes * size)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            what = (
                f"{index.path} says that sequence {start + at} has {sizes[at]} tokens from byte "
                f"{pointers[at]} on, which is outside of {tokens.path} ({tokens.size_bytes} "
                "bytes): one of them was cut short, or they do not belong together"
            )
            raise _refusal(name, what, f"copy both files again, or {AGAIN}")
        expected = end + np.cumsum(sizes) * size
        wrong = np.flatnonzero(pointers != expected - sizes * size)
        if wrong.size:
            what = (
                f"in {index.path}, sequence {start + int(wrong[0])} does not follow the one before"
            )
            raise _refusal(name, what, AGAIN)
        end = int(expected[-1])
    if end != tokens.size_bytes:
        what = (
            f"the sequences of {index.path} end at byte {end}, but {tokens.path} has "
            f"{tokens.size_bytes} bytes: they do not belong together"
        )
        raise _refusal(name, what, f"copy both files again, or {AGAIN}")


def _boundaries(index: ByteFile, header: _Header, name: str) -> Callable[[int, int], Int64s]:
    """The search for the sequences in a window that begin a document."""
    size = np.dtype(header.dtype).itemsize
    pointers = SortedOffsets(index, at=header.pointers_at, count=header.sequences)
    try:
        firsts = SortedOffsets(index, at=header.documents_at, count=header.documents)
    except ValueError as error:
        raise _refusal(name, f"the documents of {index.path}: {error}", AGAIN) from None
    if header.documents == 0 or firsts.firsts[0] != 0 or firsts.last != header.sequences:
        what = f"the documents of {index.path} do not go from sequence 0 to {header.sequences}"
        raise _refusal(name, what, AGAIN)

    def search(low: int, high: int) -> Int64s:
        first, places = pointers.span((low + 1) * size, high * size)
        _, begin = firsts.span(first, first + len(places))
        found: Int64s = places[begin - first] // size
        return found

    return search


def _refusal(name: str, what: str, fix: str) -> DataError:
    return DataError(f"{name}: {what}. To fix: {fix}.")
