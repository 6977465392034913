"""The order in which the windows of a source are seen: an own permutation for each epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]
Int64s = NDArray[np.int64]


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
