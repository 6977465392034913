"""Where the sequence becomes split, and whole again, outside of the split layers.

Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slurm_pt.parallel.axis import TensorAxis, shard_size
from slurm_pt.parallel.groups import start_all_gather


def scatter_sequence(x: Tensor, *, axis: TensorAxis, dim: int) -> Tensor:
    """This rank's part of x, which is the same on all ranks; its gradient becomes whole again."""
    output: Tensor = _Scatter.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return output


def gather_sequence(x: Tensor, *, axis: TensorAxis, dim: int) -> Tensor:
    """The whole of x. What follows does the same on all ranks, so each takes its own gradient."""
    output: Tensor = _Gather.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return output


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _own(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _whole(grads[0], ctx.axis, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _whole(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _own(grads[0], ctx.axis, ctx.dim), None, None


def _own(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    size = shard_size(x.shape[dim], axis.tp)
    return x.narrow(dim, size * axis.rank, size).contiguous()


def _whole(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    parts = x.movedim(dim, 0).contiguous()
    whole = parts.new_empty((parts.shape[0] * axis.tp, *parts.shape[1:]))
    start_all_gather(whole, parts, axis.peers).wait()
    return whole.movedim(0, dim)
