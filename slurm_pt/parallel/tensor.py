"""Layers that hold a part of a matrix, on plain local tensors (no DTensor: it costs 1.1 to 2.1x).

A block's half is one column-parallel layer, work on the local part, and one row-parallel layer:
one all-reduce forward (row) and one backward (column). With sequence parallelism each of the two
becomes a reduce-scatter and an all-gather over the sequence, and what lies between the blocks
(norms, dropout, residuals) is split over the sequence too.

Activations are [seq, batch, features]: a part of the sequence is contiguous.

Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
arXiv:2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_pt.parallel.axis import StoredPart, TensorAxis, shard_size
from slurm_pt.parallel.groups import all_reduce, start_all_gather, start_reduce_scatter
from slurm_pt.parallel.low_rank import LowRank, column_update, row_update
from slurm_pt.parallel.product import Prepare, parallel_linear
from slurm_pt.parallel.shard import WHOLE


@dataclass(frozen=True)
class Rows:
    """Output features of a column-parallel layer that belong together."""

    features: int
    """In the whole layer."""
    parts: int | None = None
    """In how many parts they are split over the ranks; None: one for each rank."""


class ColumnParallelLinear(nn.Module):
    """The product x @ weight.T + bias with the output features split: input whole, output local.

    Several outputs (query, key and value; gate and up) can share one product. Each of them is
    then stored under its own name, beside this module's: `attention.qkv` with the outputs query,
    key and value is stored as `attention.query.weight` and so on.
    """

    def __init__(
        self,
        in_features: int,
        outputs: int | Mapping[str, Rows],
        *,
        axis: TensorAxis,
        device: torch.device,
        dtype: torch.dtype,
        bias: bool = True,
        low_rank: LowRank | None = None,
    ):
        super().__init__()
        self.axis = axis
        named = {"": Rows(outputs)} if isinstance(outputs, int) else dict(outputs)
        self.outputs = named
        self.sizes = [shard_size(r.features, r.parts or axis.tp) for r in named.values()]
        local = sum(self.sizes)
        self.weight = nn.Parameter(torch.empty(local, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(local, device=device, dtype=dtype)) if bias else None
        parts = {
            name: (size, rows.parts)
            for (name, rows), size in zip(named.items(), self.sizes, strict=True)
        }
        self.lora = column_update(
            parts, in_features, low_rank, axis=axis, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, prepare: Prepare | None = None) -> Tensor:
        """[seq (/ tp), batch, in] -> [seq, batch, out / tp], of `prepare(x)` if that is given."""
        return parallel_linear(
            x,
            self.weight,
            self.bias,
            axis=self.axis,
            shared=True,
            prepare=prepare,
            update=self.lora,
        )

    def stored_parts(self, parameter: str) -> list[StoredPart]:
        parts, begin = [], 0
        for (name, rows), size in zip(self.outputs.items(), self.sizes, strict=True):
            stored = f"../{name}.{parameter}" if name else parameter
            shard = self.axis.shard(0, rows.parts)
            parts.append(StoredPart(stored, slice(begin, begin + size), shard))
            begin += size
        return parts


class RowParallelLinear(nn.Module):
    """The product x @ weight.T + bias with the input features split: input local, output whole.

    The bias is added after the sum, so it is whole on each rank.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: TensorAxis,
        device: torch.device,
        dtype: torch.dtype,
        bias: bool = True,
        low_rank: LowRank | None = None,
    ):
        super().__init__()
        self.axis = axis
        local = shard_size(in_features, axis.tp)
        self.weight = nn.Parameter(torch.empty(out_features, local, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.lora = row_update(out_features, local, low_rank, axis=axis, device=device, dtype=dtype)

    def forward(self, x: Tensor, prepare: Prepare | None = None) -> Tensor:
        """[seq, batch, in / tp] -> [seq (/ tp), batch, out], of `prepare(x)` if that is given."""
        alone = self.axis.tp == 1
        output = parallel_linear(
            x,
            self.weight,
            self.bias if alone else None,
            axis=self.axis,
            shared=False,
            prepare=prepare,
            update=self.lora,
        )
        if alone:
            return output
        output = sum_over_ranks(output, axis=self.axis)
        return output if self.bias is None else output + self.bias.to(x.dtype)

    def stored_parts(self, parameter: str) -> list[StoredPart]:
        shard = self.axis.shard(1) if parameter == "weight" else WHOLE
        return [StoredPart(parameter, slice(None), shard)]


def sum_over_ranks(x: Tensor, *, axis: TensorAxis) -> Tensor:
    """The sum of x over the group, or this rank's part of its sequence. May overwrite x."""
    if axis.tp == 1:
        return x
    function = _ReduceScatter if axis.splits_sequence else _ReduceForward
    output: Tensor = function.apply(x, axis.peers)  # type: ignore[no-untyped-call]
    return output


class _ReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        part = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
        start_reduce_scatter(x.contiguous(), part, group).wait()
        return part

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        part = grads[0].contiguous()
        whole = part.new_empty((part.shape[0] * ctx.group.size(), *part.shape[1:]))
        start_all_gather(whole, part, ctx.group).wait()
        return whole, None
