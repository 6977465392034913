"""A folder of tokens as `slurm-pt data prepare` makes it.

    <folder>/tokens.bin       ids one after another, unsigned little endian, no header
    <folder>/documents.bin    where each document begins and the last one ends, in tokens:
                              int64 little endian, one more than there are documents
    <folder>/tokens.json      `TokenInfo`

Folders without documents.bin, as the first versions made them, serve where the borders of
documents are not needed. numpy only, no torch: the login side reads these folders too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slurm_pt.errors import DataError
from slurm_pt.training.byte_file import ByteFile
from slurm_pt.training.sorted_offsets import SortedOffsets
from slurm_pt.training.token_source import TokenSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from slurm_pt.training.sorted_offsets import Int64s

TOKENS = "tokens.bin"
DOCUMENTS = "documents.bin"
INFO = "tokens.json"
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
MASK_DOCUMENTS = "data.mask_documents"
KEY = "data.path"
"""The configuration key that names a folder, where nothing else is said."""


@dataclass(frozen=True)
class TokenInfo:
    """What `tokens.json` says about a token folder."""

    dtype: str
    """uint8, uint16 or uint32."""
    num_tokens: int
    vocab_size: int
    """One more than the largest id the tokenizer can give."""
    tokenizer: str
    """"bytes", or the name of a tokenizer file."""
    documents: int
    sha256: str
    """Of tokens.bin."""


def read_token_info(folder: Path, *, key: str = KEY) -> TokenInfo:
    """The description of a token folder whose files are there and fit together.

    `key` is the configuration key that named the folder. Raises DataError.
    """
    remedy = "To fix: make the folder with `slurm-pt data prepare`"
    try:
        raw = json.loads((folder / INFO).read_text(encoding="utf-8"))
        info = TokenInfo(
            dtype=str(raw["dtype"]),
            num_tokens=int(raw["num_tokens"]),
            vocab_size=int(raw["vocab_size"]),
            tokenizer=str(raw["tokenizer"]),
            documents=int(raw["documents"]),
            sha256=str(raw["sha256"]),
        )
        size_bytes = (folder / TOKENS).stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{key}={folder}: {error.filename} is missing. {remedy}.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{key}={folder}: {INFO} cannot be read: {error!r}. {remedy}.") from None
    if info.dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise DataError(f"{key}={folder}: dtype {info.dtype!r} is none of {known}. {remedy}.")
    expected = info.num_tokens * np.dtype(DTYPES[info.dtype]).itemsize
    if size_bytes != expected:
        raise DataError(
            f"{key}={folder}: {TOKENS} has {size_bytes} bytes where {INFO} says "
            f"{expected}: it was cut short or overwritten. {remedy} again."
        )
    return info


def verify_tokens(folder: Path) -> TokenInfo:
    """The folder's description, once its ids have been read and have the right checksum."""
    info = read_token_info(folder)
    with (folder / TOKENS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != info.sha256:
        raise DataError(
            f"data.path={folder}: {TOKENS} has the checksum {digest[:12]}..., where {INFO} says "
            f"{info.sha256[:12]}...: the file is damaged. To fix: prepare the folder again."
        )
    return info


def open_token_folder(folder: Path, *, key: str = KEY, documents: bool = False) -> TokenSource:
    """The tokens of a folder; with `documents`, the borders of its documents too.

    Raises DataError for files that are missing, cut, or do not fit together.
    """
    info = read_token_info(folder, key=key)
    return TokenSource(
        name=f"{key}={folder}",
        file=ByteFile(folder / TOKENS),
        dtype=DTYPES[info.dtype],
        num_tokens=info.num_tokens,
        vocab_size=info.vocab_size,
        tokenizer=info.tokenizer,
        boundaries=_boundaries(folder, info, key) if documents else None,
    )


def _boundaries(folder: Path, info: TokenInfo, key: str) -> Callable[[int, int], Int64s]:
    """The search for borders in documents.bin, once that file was found to be sound."""
    again = f"To fix: prepare the folder again, or set {MASK_DOCUMENTS}=false"
    try:
        file = ByteFile(folder / DOCUMENTS)
    except FileNotFoundError:
        raise DataError(
            f"{key}={folder}: {MASK_DOCUMENTS}=true needs the borders of documents, but "
            f"{DOCUMENTS} is missing, as in folders of the first versions. {again}."
        ) from None
    expected = 8 * (info.documents + 1)
    if file.size_bytes != expected:
        raise DataError(
            f"{key}={folder}: {DOCUMENTS} has {file.size_bytes} bytes, where the "
            f"{info.documents} documents of {INFO} need {expected}. {again}."
        )
    try:
        offsets = SortedOffsets(file, at=0, count=info.documents + 1)
    except ValueError as error:
        raise DataError(f"{key}={folder}: {DOCUMENTS} is damaged: {error}. {again}.") from None
    if offsets.firsts[0] != 0 or offsets.last != info.num_tokens:
        raise DataError(
            f"{key}={folder}: {DOCUMENTS} goes from {offsets.firsts[0]} to {offsets.last}, where "
            f"{INFO} says 0 to {info.num_tokens}: the files do not belong together. {again}."
        )
    return lambda low, high: offsets.span(low + 1, high)[1]
