"""Which source each sample of a run comes from, when several are mixed by weight.

A function of the sample's number alone: nothing is walked and nothing is kept. The sources are
the leaves of a binary tree. Of the first m samples that come to a node, round(m * p) go to its
left, where p is the left's share of the node's weight; so sample m goes left when that number
grows from m to m + 1. Following a sample down gives its source, and how many samples of that
source came before it.

The bound: after every number of samples g, each source has given g * its weight samples, to
within 1.68. Rounding adds at most 1/2 at each node, and what came from above is scaled by p; the
error of a leaf of weight w is at most 1/2 * (sum of w / W over the weights W on its way up). The
tree is Huffman's: there, from one node up to the next but one, weights grow at least as
Fibonacci's numbers do, and the sum of the reciprocals of those is 3.36. Weights are rounded to
shares of 2**31, which adds less than one sample in a billion for each source.

Source: Huffman 1952, "A method for the construction of minimum-redundancy codes".
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Int64s = NDArray[np.int64]

RESOLUTION = 2**31
"""What weights are shares of. Its square still fits an int64: all that is done here is exact."""


@dataclass(frozen=True)
class _Node:
    weight: int
    source: int
    """Of a leaf; of an inner node, the smallest below it."""
    left: _Node | None = None
    right: _Node | None = None

    def left_of(self, numbers: Int64s) -> Int64s:
        """How many of the first n samples of this node go to its left, for each n."""
        if self.left is None:
            return numbers
        share = self.left.weight
        rounds, rest = np.divmod(numbers, self.weight)  # the product of the whole would not fit
        left: Int64s = rounds * share + (rest * share + self.weight // 2) // self.weight
        return left


class MixtureOrder:
    """The source of each sample of a run, and which sample of that source it is."""

    def __init__(self, weights: Sequence[float]):
        if not weights or not all(weight > 0 and math.isfinite(weight) for weight in weights):
            raise ValueError(f"weights must be positive, and there must be one: {weights}")
        total = math.fsum(weights)
        shares = [max(1, round(weight / total * RESOLUTION)) for weight in weights]
        self.num_sources = len(weights)
        self._root = _huffman(shares)

    def __call__(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """(source, number within that source) of samples counted from the start of the run."""
        numbers = np.asarray(samples, dtype=np.int64)
        sources, own = np.zeros_like(numbers), numbers.copy()
        pending = [(self._root, np.arange(numbers.size))]
        while pending:
            node, places = pending.pop()
            if node.left is None or node.right is None:
                sources[places] = node.source
                continue
            before = node.left_of(own[places])
            goes_left = node.left_of(own[places] + 1) > before
            own[places] = np.where(goes_left, before, own[places] - before)
            branches = (node.left, places[goes_left]), (node.right, places[~goes_left])
            pending += [branch for branch in branches if branch[1].size]
        return sources, own

    def counts(self, total: int) -> list[int]:
        """How many of the first `total` samples each source gives."""
        found = [0] * self.num_sources
        pending = [(self._root, total)]
        while pending:
            node, number = pending.pop()
            if node.left is None or node.right is None:
                found[node.source] = number
                continue
            left = int(node.left_of(np.array([number]))[0])
            pending += [(node.left, left), (node.right, number - left)]
        return found


def _huffman(shares: Sequence[int]) -> _Node:
    """The tree in which the two lightest nodes are always joined; ties by the smallest source."""
    heap = [(share, source, _Node(share, source)) for source, share in enumerate(shares)]
    heapq.heapify(heap)
    while len(heap) > 1:
        light, source, left = heapq.heappop(heap)
        heavy, other, right = heapq.heappop(heap)
        joined = _Node(light + heavy, min(source, other), left, right)
        heapq.heappush(heap, (joined.weight, joined.source, joined))
    return heap[0][2]
