"""The training tokens: a folder of memory-mapped ids, and which of them a step sees.

A batch is a function of (seed, step, index in the global batch). There is no state to save:
neither the number of ranks nor a restart changes what a step sees.

    <folder>/tokens.bin    ids one after another, unsigned little endian, no header
    <folder>/tokens.json   `TokenInfo`

numpy only, no torch: the login side reads these folders too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slurm_pt.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TOKENS = "tokens.bin"
INFO = "tokens.json"
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}

UInt64s = NDArray[np.uint64]
Int64s = NDArray[np.int64]


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


def read_token_info(folder: Path) -> TokenInfo:
    """The description of a token folder whose files are there and fit together."""
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
        raise DataError(f"data.path={folder}: {error.filename} is missing. {remedy}.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"data.path={folder}: {INFO} cannot be read: {error!r}. {remedy}."
        ) from None
    if info.dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise DataError(f"data.path={folder}: dtype {info.dtype!r} is none of {known}. {remedy}.")
    expected = info.num_tokens * np.dtype(DTYPES[info.dtype]).itemsize
    if size_bytes != expected:
        raise DataError(
            f"data.path={folder}: {TOKENS} has {size_bytes} bytes where {INFO} says "
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


class TokenDataset:
    """Batches of windows of `seq_len` + 1 tokens; windows overlap by that one token.

    Each window is seen once in an epoch, in an order that is a function of (seed, epoch);
    sample g of a run is number g modulo the number of windows in epoch g // that number.
    """

    def __init__(
        self, folder: Path, *, seq_len: int, global_batch_size: int, vocab_size: int, seed: int
    ):
        self.folder = folder
        self.info = read_token_info(folder)
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.vocab_size = vocab_size
        self.num_windows = (self.info.num_tokens - 1) // seq_len
        if self.num_windows < 1:
            raise DataError(
                f"data.path={folder}: {self.info.num_tokens} tokens are fewer than the "
                f"{seq_len + 1} of one sample. To fix: lower train.seq_len={seq_len}, or "
                "prepare more text."
            )
        if self.info.vocab_size > vocab_size:
            raise DataError(
                f"data.path={folder}: its tokenizer ({self.info.tokenizer}) has "
                f"{self.info.vocab_size} ids. To fix: set model.vocab_size to at least that; it "
                f"is {vocab_size}."
            )
        self.order = sample_order(seed, self.num_windows)
        self.tokens = np.memmap(folder / TOKENS, dtype=DTYPES[self.info.dtype], mode="r")

    def batch(self, step: int, indices: Sequence[int]) -> Int64s:
        """Some samples of a step's global batch: ids, [len(indices), seq_len + 1].

        Args:
            step: Completed steps.
            indices: Places in the global batch, 0 .. global_batch_size - 1.
        """
        samples = step * self.global_batch_size + np.asarray(indices, dtype=np.int64)
        starts = self.order(samples) * self.seq_len
        rows = [self.tokens[start : start + self.seq_len + 1] for start in starts.tolist()]
        ids: Int64s = np.stack(rows).astype(np.int64)
        if ids.max() >= self.vocab_size:
            raise DataError(
                f"data.path={self.folder}: holds the id {ids.max()}, but {INFO} promises ids "
                f"below {self.info.vocab_size}. To fix: prepare the folder again."
            )
        return ids


@dataclass(frozen=True)
class SampleOrder:
    """The window of each sample of a run: each epoch a new permutation, in no memory.

    A Feistel network permutes 0 .. 4**k - 1 for the smallest k that covers all windows; results
    beyond the windows are put through it again until they fall among them (cycle walking: at
    most 4 times on average), which leaves a permutation of the windows.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", methods 2 and 3.
    """

    seed: int
    num_windows: int

    rounds = 8

    def __call__(self, samples: Int64s) -> Int64s:
        """The windows of samples that are counted from the start of the run."""
        epochs, positions = np.divmod(np.asarray(samples, dtype=np.int64), self.num_windows)
        windows = positions.astype(np.uint64)
        keys = self._keys(epochs.astype(np.uint64))
        pending = np.ones(windows.shape, dtype=np.bool_)
        while pending.any():
            windows[pending] = self._permute(windows[pending], keys[:, pending])
            pending = windows >= np.uint64(self.num_windows)
        return windows.astype(np.int64)

    def _keys(self, epochs: UInt64s) -> UInt64s:
        """One key for each round and epoch, [rounds, epochs]."""
        seeded = _mix(epochs ^ _mix(np.array([self.seed % 2**64], dtype=np.uint64)))
        rounds = np.arange(1, self.rounds + 1, dtype=np.uint64)
        return _mix(seeded[np.newaxis, :] ^ _mix(rounds)[:, np.newaxis])

    def _permute(self, values: UInt64s, keys: UInt64s) -> UInt64s:
        half_bits = np.uint64(max(1, ((self.num_windows - 1).bit_length() + 1) // 2))
        mask = (np.uint64(1) << half_bits) - np.uint64(1)
        left, right = values >> half_bits, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << half_bits) | right


def sample_order(seed: int, num_windows: int) -> SampleOrder:
    """The order of windows in every epoch, as a function of (seed, epoch).

    >>> order = sample_order(seed=7, num_windows=5)
    >>> sorted(order(np.arange(5)).tolist()), sorted(order(np.arange(5, 10)).tolist())
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    """
    if num_windows < 1:
        raise ValueError(f"num_windows must be at least 1, not {num_windows}")
    return SampleOrder(seed=seed, num_windows=num_windows)


def _mix(values: Any) -> UInt64s:
    """A well-mixed function of each 64-bit number.

    Source: Steele, Lea and Flood 2014, splitmix64.
    """
    mixed: UInt64s = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
