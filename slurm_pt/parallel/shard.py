"""Which part of a whole tensor a rank holds. Integers only, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor: where it begins, and how far it goes, along each dim."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """Nothing split (`dim` None), or one of `parts` equal parts along a dim.

    With fewer parts than tensor ranks, neighbouring ranks hold the same part: the key and value
    heads of grouped-query attention, where there are fewer of them than ranks.
    """

    dim: int | None = None
    parts: int = 1
    index: int = 0

    @classmethod
    def over(cls, dim: int, *, tp: int, tp_rank: int, parts: int | None = None) -> Shard:
        """The part of a rank, of `parts` (default: one for each rank).

        >>> Shard.over(0, tp=4, tp_rank=3, parts=2)
        Shard(dim=0, parts=2, index=1)
        """
        parts = tp if parts is None else parts
        if tp % parts:
            raise ValueError(f"{parts} parts cannot be given to {tp} ranks evenly")
        return cls(dim, parts, tp_rank * parts // tp)

    @property
    def split(self) -> bool:
        return self.dim is not None and self.parts > 1

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole, from that of a part.

        >>> Shard(1, 2, 0).whole_shape((3, 4))
        (3, 8)
        """
        return tuple(
            size * self.parts if axis == self.dim else size for axis, size in enumerate(local)
        )

    def offsets(self, local: Sequence[int]) -> tuple[int, ...]:
        """Where the part begins in the whole.

        >>> Shard(1, 2, 1).offsets((3, 4))
        (0, 4)
        """
        return tuple(
            size * self.index if axis == self.dim else 0 for axis, size in enumerate(local)
        )

    def boxes(self, local: Sequence[int]) -> list[Box]:
        """What of the whole is held by a tensor of this shape, in the order of its numbers."""
        return [Box(self.offsets(local), tuple(local))]


WHOLE = Shard()


@dataclass(frozen=True)
class Fragment(Shard):
    """Of a shard only a range of its numbers, counted in their flat order.

    That is what a replica keeps of a moment with ZeRO. The tensor that holds them is flat.
    """

    shape: tuple[int, ...] = ()
    """Of the shard."""
    numbers: range = range(0)
    """May be empty."""

    @classmethod
    def of(cls, shard: Shard, shape: Sequence[int], numbers: range) -> Fragment:
        """Some numbers of a shard that has this shape."""
        return cls(shard.dim, shard.parts, shard.index, tuple(shape), numbers)

    def whole_shape(self, _local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole; that of the flat tensor does not matter."""
        return super().whole_shape(self.shape)

    def boxes(self, _local: Sequence[int]) -> list[Box]:
        """At most 2 N - 1 for N dims.

        >>> for box in Fragment(shape=(3, 4), numbers=range(2, 9)).boxes((7,)):
        ...     print(*box)
        (0, 2) (1, 2)
        (1, 0) (1, 4)
        (2, 0) (1, 1)
        """
        corner = self.offsets(self.shape)
        return [
            Box(tuple(at + begin for at, begin in zip(offsets, corner, strict=True)), shape)
            for offsets, shape in _boxes(self.shape, self.numbers.start, self.numbers.stop)
        ]


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The numbers from `begin` to `end` of a flattened tensor: a row's end, rows, a row's start."""
    if begin >= end:
        return
    if len(shape) < 2:
        yield Box((begin,), (end - begin,)) if shape else Box((), ())
        return
    rows = shape[1:]
    row = math.prod(rows)
    whole_from = min(end, -(-begin // row) * row)
    whole_to = max(whole_from, end // row * row)
    yield from _in_row(begin // row, rows, begin, whole_from)
    if whole_from < whole_to:
        count = (whole_to - whole_from) // row
        yield Box((whole_from // row, *(0 for _ in rows)), (count, *rows))
    yield from _in_row(whole_to // row, rows, whole_to, end)


def _in_row(index: int, row: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Those of one row along dim 0, counted as in `_boxes`."""
    first = index * math.prod(row)
    for offsets, shape in _boxes(row, begin - first, end - first):
        yield Box((index, *offsets), (1, *shape))
