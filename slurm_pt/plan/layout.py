"""Where each rank stands in the tensor x pipeline x data grid. Integers only."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ParallelLayout:
    """The degrees of a job and the place of every rank.

    Ranks are numbered with tp fastest, then dp, then pp (Megatron-LM's default order
    "tp-cp-ep-dp-pp"): a tensor group is a block of neighbours, so it stays inside a node,
    and only pipeline neighbours, which send least, are far apart.

    >>> layout = ParallelLayout(tp=2, pp=2, dp=2)
    >>> layout.place(5)
    Place(tp_rank=1, pp_rank=1, dp_rank=0)
    >>> layout.tp_ranks(5), layout.dp_ranks(5), layout.pp_ranks(5)
    ((4, 5), (5, 7), (1, 5))
    """

    tp: int
    pp: int
    dp: int

    def __post_init__(self) -> None:
        if any(degree < 1 for degree in (self.tp, self.pp, self.dp)):
            raise ValueError(f"degrees must be at least 1: {self}")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def rank(self, place: Place) -> int:
        """The rank that stands at a place."""
        return place.tp_rank + self.tp * (place.dp_rank + self.dp * place.pp_rank)

    def place(self, rank: int) -> Place:
        """The place of a rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in 0..{self.world_size - 1}")
        return Place(
            tp_rank=rank % self.tp,
            dp_rank=rank // self.tp % self.dp,
            pp_rank=rank // (self.tp * self.dp),
        )

    def tp_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other parts of this rank's layers, itself included."""
        here = self.place(rank)
        return tuple(self.rank(Place(t, here.pp_rank, here.dp_rank)) for t in range(self.tp))

    def pp_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's pipeline, first stage first."""
        here = self.place(rank)
        return tuple(self.rank(Place(here.tp_rank, p, here.dp_rank)) for p in range(self.pp))

    def dp_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same weights as this one, itself included."""
        here = self.place(rank)
        return tuple(self.rank(Place(here.tp_rank, here.pp_rank, d)) for d in range(self.dp))


@dataclass(frozen=True)
class Place:
    """A rank's position along each axis of the grid."""

    tp_rank: int
    pp_rank: int
    dp_rank: int


def split_layers(
    num_layers: int, stages: int, sizes: Sequence[int] | None = None, *, share: int = 1
) -> tuple[range, ...]:
    """The layers of each pipeline stage: contiguous, and as even as can be without `sizes`.

    Left-over layers go to the stages in the middle, since the first stage also holds the
    embedding and the last one the output head. Groups of `share` layers, which use one set of
    weights, stay together.

    >>> [list(stage) for stage in split_layers(5, 3)]
    [[0, 1], [2, 3], [4]]
    >>> [len(stage) for stage in split_layers(10, 4)]
    [2, 3, 3, 2]
    >>> [list(stage) for stage in split_layers(5, 3, [1, 3, 1])]
    [[0], [1, 2, 3], [4]]
    >>> [list(stage) for stage in split_layers(6, 2, share=2)]
    [[0, 1, 2, 3], [4, 5]]
    """
    if num_layers % share or not 1 <= stages <= num_layers // share:
        shared = "" if share == 1 else f", each {share} sharing their weights,"
        raise ValueError(f"{num_layers} layers{shared} cannot fill {stages} stages")
    if sizes is None:
        base, left_over = divmod(num_layers // share, stages)
        sizes = [base * share] * stages
        first = (stages - left_over) // 2
        for stage in range(first, first + left_over):
            sizes[stage] += share
    elif any(size % share for size in sizes):
        raise ValueError(f"{list(sizes)} parts layers that share weights: {share} each")
    elif len(sizes) != stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ValueError(f"{list(sizes)} is no split of {num_layers} layers into {stages} stages")
    bounds = [sum(sizes[:stage]) for stage in range(stages + 1)]
    return tuple(range(bounds[stage], bounds[stage + 1]) for stage in range(stages))


def split_by_cost(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """The items of each stage: contiguous, with the dearest stage as cheap as can be.

    >>> [list(stage) for stage in split_by_cost([1, 1, 1, 1, 4], 2)]
    [[0, 1, 2, 3], [4]]
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} items cannot fill {stages} stages")
    ends = [sum(costs[:number]) for number in range(len(costs) + 1)]
    # best[n]: the dearest stage of the first n items, and where the last stage begins.
    best = [(float("inf"), 0)] * (len(costs) + 1)
    best[0] = (0.0, 0)
    begins: list[list[int]] = []
    for _ in range(stages):
        best = [
            min(
                ((max(best[begin][0], ends[end] - ends[begin]), begin) for begin in range(end)),
                default=(float("inf"), 0),
            )
            for end in range(len(costs) + 1)
        ]
        begins.append([begin for _, begin in best])
    bounds = [len(costs)]
    for of_stage in reversed(begins):
        bounds.insert(0, of_stage[bounds[0]])
    return tuple(range(first, last) for first, last in itertools.pairwise(bounds))
