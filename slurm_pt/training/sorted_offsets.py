"""Sorted numbers in a file, searched without holding them: a corpus has up to 10**9 documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from slurm_pt.training.byte_file import ByteFile

Int64s = NDArray[np.int64]

BLOCK = 512
"""Every how many numbers one is kept in memory: one read of 4 KiB then finds any of them."""
PIECE = 256 * BLOCK
"""How many numbers are in memory while all of them are looked at."""


class SortedOffsets:
    """`count` int64 numbers from byte `at` of a file, none smaller than the one before.

    Reads all of them once. Raises ValueError with the place of one that is out of order.
    """

    def __init__(self, file: ByteFile, *, at: int, count: int):
        self.file, self.at, self.count = file, at, count
        self.last = 0
        firsts = []
        for start in range(0, count, PIECE):
            numbers = self._read(start, min(start + PIECE, count))
            smaller = np.flatnonzero(numbers < np.concatenate([[self.last], numbers[:-1]]))
            if smaller.size:
                raise ValueError(f"number {start + int(smaller[0])} is smaller than the one before")
            firsts.append(numbers[::BLOCK])
            self.last = int(numbers[-1])
        self.firsts: Int64s = np.concatenate(firsts) if firsts else np.empty(0, dtype=np.int64)

    def span(self, low: int, high: int) -> tuple[int, Int64s]:
        """The numbers n with low <= n < high, and the place of the first of them."""
        before, after = self.firsts.searchsorted((low, high)).tolist()
        start = max(before - 1, 0) * BLOCK  # the last block that begins below `low`
        numbers = self._read(start, min(after * BLOCK, self.count))
        first, end = numbers.searchsorted((low, high)).tolist()
        return start + first, numbers[first:end]

    def _read(self, start: int, end: int) -> Int64s:
        count = max(end - start, 0)
        return self.file.read("<i8", count=count, offset=self.at + 8 * start)
