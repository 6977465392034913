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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from slurm_pt.parallel.axis import StoredPart, TensorAxis, shard_size
from slurm_pt.parallel.groups import all_reduce, start_all_reduce
from slurm_pt.parallel.shard import WHOLE
from slurm_pt.parallel.weight_gradients import add_weight_gradient

Prepare = Callable[[Tensor], Tensor]
"""A cheap function in front of a product (a norm, a non-linearity), to be computed again in the
backward pass instead of keeping what it gave. Its parameters get their gradients."""


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
    ):
        super().__init__()
        self.axis = axis
        named = {"": Rows(outputs)} if isinstance(outputs, int) else dict(outputs)
        self.outputs = named
        self.sizes = [shard_size(r.features, r.parts or axis.tp) for r in named.values()]
        local = sum(self.sizes)
        self.weight = nn.Parameter(torch.empty(local, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(local, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, prepare: Prepare | None = None) -> Tensor:
        """[seq (/ tp), batch, in] -> [seq, batch, out / tp], of `prepare(x)` if that is given."""
        return column_parallel_linear(x, self.weight, self.bias, axis=self.axis, prepare=prepare)

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
    ):
        super().__init__()
        self.axis = axis
        local = shard_size(in_features, axis.tp)
        self.weight = nn.Parameter(torch.empty(out_features, local, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )

    def forward(self, x: Tensor, prepare: Prepare | None = None) -> Tensor:
        """[seq, batch, in / tp] -> [seq (/ tp), batch, out], of `prepare(x)` if that is given."""
        if self.axis.tp == 1:
            return linear(x, self.weight, self.bias, axis=self.axis, prepare=prepare)
        output = linear(x, self.weight, None, axis=self.axis, prepare=prepare)
        output = sum_over_ranks(output, axis=self.axis)
        return output if self.bias is None else output + self.bias.to(x.dtype)

    def stored_parts(self, parameter: str) -> list[StoredPart]:
        shard = self.axis.shard(1) if parameter == "weight" else WHOLE
        return [StoredPart(parameter, slice(None), shard)]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    axis: TensorAxis,
    prepare: Prepare | None = None,
) -> Tensor:
    """The product x @ weight.T + bias, with nothing to be summed over ranks.

    With `prepare` it is that of prepare(x), which the backward pass computes again from x.
    """
    output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, axis, False, prepare
    )
    return output


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    axis: TensorAxis,
    prepare: Prepare | None = None,
) -> Tensor:
    """The product x @ weight.T + bias for this rank's output features; `prepare` as in `linear`.

    Weights are cast to the format of x, so float32 weights can serve bfloat16 activations.
    """
    if axis.tp == 1:
        return linear(x, weight, bias, axis=axis, prepare=prepare)
    output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, axis, True, prepare
    )
    return output


def sum_over_ranks(x: Tensor, *, axis: TensorAxis) -> Tensor:
    """The sum of x over the group, or this rank's part of its sequence. May overwrite x."""
    if axis.tp == 1:
        return x
    function = _ReduceScatter if axis.splits_sequence else _ReduceForward
    output: Tensor = function.apply(x, axis.peers)  # type: ignore[no-untyped-call]
    return output


def _weight_gradient(
    weight: Tensor, grad_output: Tensor, x: Tensor, axis: TensorAxis
) -> Tensor | None:
    """grad_output.T @ x for autograd; None if it has been, or will be, added to `weight.grad`.

    Autograd would first make the product and then add it: a pass over memory more.
    """
    rows, columns = grad_output.flatten(0, -2), x.flatten(0, -2)
    later = axis.weight_gradients
    if later is not None and later.put_off(weight, rows, columns):
        return None
    own = axis.adds_gradients and weight.grad is not None and weight.grad.dtype == rows.dtype
    if not own:
        return rows.t() @ columns
    add_weight_gradient(weight, rows, columns)
    return None


class _Again:
    """What a layer's product was taken of, computed once more for its backward pass."""

    def __init__(self, x: Tensor, prepare: Prepare | None):
        self.leaf, self.entered, self.output = x, x, None
        if prepare is not None:
            with torch.enable_grad():
                self.leaf = x.detach().requires_grad_()
                self.output = prepare(self.leaf)
            self.entered = self.output.detach()

    def gradient(self, grad_entered: Tensor | None) -> Tensor | None:
        """The gradient of x; those of what `prepare` holds are added to its parameters."""
        if self.output is None:
            return grad_entered
        torch.autograd.backward(self.output, grad_entered)
        return self.leaf.grad


class _Linear(torch.autograd.Function):
    """The product of `prepare(x)` and a weight.

    With `shared` input (column-parallel) the input gradient's reduction over the ranks runs while
    the weight gradient is computed. With a split sequence the whole input is gathered again for
    the weight gradient, while the input gradient is computed: keeping it would undo what the split
    saves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: TensorAxis,
        shared: bool,
        prepare: Prepare | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.axis, ctx.shared, ctx.prepare = bias is not None, axis, shared, prepare
        x = x if prepare is None else prepare(x)
        if shared and axis.splits_sequence:
            x, work = _start_gather(x, axis)
            work.wait()
        bias = None if bias is None else bias.to(x.dtype)
        return functional.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_output,) = grads  # [seq, batch, out]
        x, weight = ctx.saved_tensors
        axis: TensorAxis = ctx.axis
        again = _Again(x, ctx.prepare)
        entered, grad_entered, reducing, gathering = again.entered, None, None, None
        if ctx.shared and axis.splits_sequence:
            entered, gathering = _start_gather(entered, axis)
        if ctx.needs_input_grad[0]:
            grad_entered = grad_output @ weight.to(x.dtype)
            if ctx.shared:
                grad_entered, reducing = _start_reduction(grad_entered, axis)
        if gathering is not None:
            gathering.wait()
        grad_weight = _weight_gradient(weight, grad_output, entered, axis)
        grad_bias = grad_output.flatten(0, -2).sum(0) if ctx.has_bias else None
        if reducing is not None:
            reducing.wait()
        return again.gradient(grad_entered), grad_weight, grad_bias, None, None, None


def _start_gather(x: Tensor, axis: TensorAxis) -> tuple[Tensor, dist.Work]:
    """The whole sequence, [seq, ...] of [seq / tp, ...], once the work has ended."""
    whole = x.new_empty((x.shape[0] * axis.tp, *x.shape[1:]))
    work: Any = dist.all_gather_into_tensor(whole, x.contiguous(), group=axis.peers, async_op=True)
    return whole, work


def _start_reduction(x: Tensor, axis: TensorAxis) -> tuple[Tensor, dist.Work | None]:
    """The sum over the ranks, or this rank's part of its sequence, once the work has ended."""
    if not axis.splits_sequence:
        return x, start_all_reduce(x, axis.peers)
    part = x.new_empty((x.shape[0] // axis.tp, *x.shape[1:]))
    work: Any = dist.reduce_scatter_tensor(part, x.contiguous(), group=axis.peers, async_op=True)
    return part, work


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
        dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
        return part

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        part = grads[0].contiguous()
        whole = part.new_empty((part.shape[0] * ctx.group.size(), *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part, group=ctx.group)
        return whole, None
