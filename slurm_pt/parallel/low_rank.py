"""Low-rank updates beside frozen weights (LoRA): W x + scale * B A x, split as W is.

A column-parallel layer has A whole on each tensor rank and B split by rows as W is; a row-parallel
one has A split by columns and B whole. So the update is added to what W's product gives before
that is summed over the ranks, and the input's gradient is summed once for both: no message of the
size of the activations comes on top. The factor that is whole has on each rank a part of its
gradient, to be summed over the ranks once a step.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.1; how it is split follows from Shoeybi et al.
2019, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slurm_pt.parallel.axis import StoredPart, TensorAxis
from slurm_pt.parallel.shard import WHOLE, Shard

FACTORS = ("lora_a", "lora_b")
"""Last part of the names under which they are stored."""


@dataclass(frozen=True)
class LowRank:
    """Which outputs of a model are updated, and how."""

    rank: int
    scale: float
    """alpha / rank."""
    targets: frozenset[str]
    """Names of outputs."""


@dataclass(frozen=True)
class Updated:
    """One output of a product that gets an update."""

    rows: slice
    """Of the product's local output features."""
    a: Shard
    """Where this rank's part of A lies in the whole one."""
    b: Shard
    """The same of B."""


class LowRankUpdate(nn.Module):
    """The factors of all updates of one product.

    Shapes: a [outputs * rank, in], the A's below one another, so that one product serves all;
    b_NAME [out of that output, rank]. They are stored beside the weight of the output that they
    update: `attention.qkv` with an update of query stores `attention.query.lora_a`.
    """

    def __init__(
        self,
        updated: Mapping[str, Updated],
        in_features: int,
        *,
        low_rank: LowRank,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.updated, self.rank, self.scale = dict(updated), low_rank.rank, low_rank.scale
        below = len(updated) * self.rank
        self.a = nn.Parameter(torch.empty(below, in_features, device=device, dtype=dtype))
        for name, output in updated.items():
            size = output.rows.stop - output.rows.start
            factor = torch.empty(size, self.rank, device=device, dtype=dtype)
            self.register_parameter(f"b_{name}", nn.Parameter(factor))

    def factors(self) -> list[Tensor]:
        """A, then the B's."""
        return list(self.parameters(recurse=False))

    def stored_parts(self, parameter: str) -> list[StoredPart]:
        parts, begin = [], 0
        for name, output in self.updated.items():
            beside = f"../../{name}." if name else "../"
            if parameter == "a":
                rows = slice(begin, begin + self.rank)
                parts.append(StoredPart(f"{beside}lora_a", rows, output.a))
            elif parameter == f"b_{name}":
                parts.append(StoredPart(f"{beside}lora_b", slice(None), output.b))
            begin += self.rank
        return parts

    # ------------------------------------------ the arithmetic, for the backward pass of a product

    def add_to(self, output: Tensor, x: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """Add the updates to [..., out], in place; gives scale * A x, [..., outputs * rank]."""
        a, *bs = factors
        inner = (x @ a.to(x.dtype).t()).mul_(self.scale)
        rows, columns = output.view(-1, output.shape[-1]), inner.flatten(0, -2)
        for place, (updated, b) in enumerate(zip(self.updated.values(), bs, strict=True)):
            rows[:, updated.rows].addmm_(columns[:, self._inner_rows(place)], b.to(x.dtype).t())
        return inner

    def inner_gradient(self, grad_output: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """The gradient of A x, [..., outputs * rank]: on each rank that of its own features."""
        _, *bs = factors
        parts = [
            grad_output[..., updated.rows] @ b.to(grad_output.dtype)
            for updated, b in zip(self.updated.values(), bs, strict=True)
        ]
        return torch.cat(parts, dim=-1).mul_(self.scale)

    def add_input_gradient(
        self, grad_x: Tensor, inner_gradient: Tensor, factors: Sequence[Tensor]
    ) -> None:
        """Add what the updates give to the gradient of x, in place."""
        a = factors[0].to(grad_x.dtype)
        grad_x.view(-1, grad_x.shape[-1]).addmm_(inner_gradient.flatten(0, -2), a)

    def gradient_terms(
        self,
        factors: Sequence[Tensor],
        grad_output: Tensor,
        inner_gradient: Tensor,
        inner: Tensor,
        x: Tensor,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each factor (rows, columns), of which rows.T @ columns is its gradient."""
        a, *bs = factors
        yield a, inner_gradient, x
        for place, (updated, b) in enumerate(zip(self.updated.values(), bs, strict=True)):
            yield b, grad_output[..., updated.rows], inner[..., self._inner_rows(place)]

    def _inner_rows(self, place: int) -> slice:
        """Which part of A x belongs to an output, by its place among the updated ones."""
        return slice(place * self.rank, (place + 1) * self.rank)


def column_update(
    outputs: Mapping[str, tuple[int, int | None]],
    in_features: int,
    low_rank: LowRank | None,
    *,
    axis: TensorAxis,
    device: torch.device,
    dtype: torch.dtype,
) -> LowRankUpdate | None:
    """That of a column-parallel product, whose outputs are (local size, parts); None: no target."""
    updated, begin = {}, 0
    for name, (size, parts) in outputs.items():
        if low_rank is not None and name in low_rank.targets:
            rows = slice(begin, begin + size)
            updated[name] = Updated(rows, a=WHOLE, b=axis.shard(0, parts))
        begin += size
    if low_rank is None or not updated:
        return None
    return LowRankUpdate(updated, in_features, low_rank=low_rank, device=device, dtype=dtype)


def row_update(
    out_features: int,
    local_features: int,
    low_rank: LowRank | None,
    *,
    axis: TensorAxis,
    device: torch.device,
    dtype: torch.dtype,
) -> LowRankUpdate | None:
    """That of a row-parallel product of `local_features` inputs on this rank; None: no update."""
    if low_rank is None:
        return None
    updated = {"": Updated(slice(0, out_features), a=axis.shard(1), b=WHOLE)}
    return LowRankUpdate(updated, local_features, low_rank=low_rank, device=device, dtype=dtype)
