"""Which part of a whole tensor a rank of the tensor group holds. Integers only, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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


WHOLE = Shard()


@dataclass(frozen=True)
class Box:
    """A block of a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FlatPart:
    """A range of what a tensor rank holds, in row-major order: ZeRO's part of it.

    Its tensor is flat. The range ends with that tensor.
    """

    shard: Shard
    local: tuple[int, ...]
    """The shape of all that the tensor rank holds."""
    begin: int
    """Numbers of it that come before."""

    def whole_shape(self, _: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole; that of the flat tensor does not matter."""
        return self.shard.whole_shape(self.local)

    def boxes(self, size: int) -> list[Box]:
        """The range of `size` numbers as boxes of the whole tensor, in order.

        >>> FlatPart(Shard(0, 2, 1), (2, 3), begin=1).boxes(5)
        [Box(offsets=(2, 1), shape=(1, 2)), Box(offsets=(3, 0), shape=(1, 3))]
        """
        origin = self.shard.offsets(self.local)
        return [
            Box(tuple(o + b for o, b in zip(origin, box.offsets, strict=True)), box.shape)
            for box in boxes_of_range(self.local, self.begin, self.begin + size)
        ]


Part = Shard | FlatPart
"""Which part of a whole tensor a tensor is."""


def boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """The numbers `begin` to `end` of a row-major tensor of n dims as at most 2 n - 1 boxes.

    >>> boxes_of_range((4, 3), 2, 9)
    [Box(offsets=(0, 2), shape=(1, 1)), Box(offsets=(1, 0), shape=(2, 3))]
    """
    if begin >= end:
        return []
    if len(shape) <= 1:
        return [Box((begin,) * len(shape), (end - begin,) * len(shape))]
    inner = shape[1:]
    row = math.prod(inner)

    def in_row(index: int, low: int, high: int) -> list[Box]:
        found = boxes_of_range(inner, low, high)
        return [Box((index, *box.offsets), (1, *box.shape)) for box in found]

    first, last = -(-begin // row), end // row  # rows that are whole
    if first > last:
        return in_row(last, begin - last * row, end - last * row)
    head = in_row(first - 1, begin - (first - 1) * row, row) if begin < first * row else []
    middle = [Box((first,) + (0,) * len(inner), (last - first, *inner))] if first < last else []
    return [*head, *middle, *in_row(last, 0, end - last * row)]
