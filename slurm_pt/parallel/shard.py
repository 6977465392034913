"""Which part of a whole tensor a rank of the tensor group holds. Integers only, no torch."""

from __future__ import annotations

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

    def slices(self, local: Sequence[int]) -> tuple[slice, ...]:
        """The part of the whole, to index it with.

        >>> Shard(1, 2, 1).slices((3, 4))
        (slice(0, 3, None), slice(4, 8, None))
        """
        begin = self.offsets(local)
        return tuple(slice(b, b + n) for b, n in zip(begin, local, strict=True))


WHOLE = Shard()
