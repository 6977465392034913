"""Layers that hold a part of a matrix, on plain local tensors (no DTensor: it costs 1.1 to 2.1x).

A block's half is one column-parallel layer, work on the local part, and one row-parallel layer:
one all-reduce forward (row) and one backward (column).

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from slurm_pt.parallel.groups import all_reduce, start_all_reduce
from slurm_pt.parallel.weight_gradients import WeightGradients


def shard_size(size: int, group: dist.ProcessGroup) -> int:
    """This rank's part of a dimension that is split evenly over the group."""
    if size % group.size():
        raise ValueError(f"{size} cannot be split evenly over {group.size()} ranks")
    return size // group.size()


class ColumnParallelLinear(nn.Module):
    """The product x @ weight.T + bias with the output features split: input whole, output local."""

    shard_dims: ClassVar[dict[str, int | None]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        bias: bool = True,
        weight_gradients: WeightGradients | None = None,
    ):
        super().__init__()
        self.group, self.weight_gradients = group, weight_gradients
        local = shard_size(out_features, group)
        self.weight = nn.Parameter(torch.empty(local, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(local, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out / tp]
        return column_parallel_linear(
            x,
            self.weight,
            self.bias,
            group=self.group,
            weight_gradients=self.weight_gradients,
        )


class RowParallelLinear(nn.Module):
    """The product x @ weight.T + bias with the input features split: input local, output whole.

    The bias is added after the sum, so it is whole on each rank, and its gradient too.
    """

    shard_dims: ClassVar[dict[str, int | None]] = {"weight": 1, "bias": None}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        weight_gradients: WeightGradients | None = None,
    ):
        super().__init__()
        self.group, self.weight_gradients = group, weight_gradients
        local = shard_size(in_features, group)
        self.weight = nn.Parameter(torch.empty(out_features, local, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:  # [..., in / tp] -> [..., out]
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if self.weight_gradients is not None:
            # The input gradient is this rank's own: there is no group to sum it over.
            output = _linear(x, self.weight, None, None, self.weight_gradients)
            return reduce_forward(output, group=self.group) + bias
        if self.group.size() == 1:
            return functional.linear(x, weight, bias)
        return reduce_forward(functional.linear(x, weight), group=self.group) + bias


class VocabParallelEmbedding(nn.Module):
    """Rows of a table by token id, with the ids split in contiguous ranges over the ranks."""

    shard_dims: ClassVar[dict[str, int | None]] = {"weight": 0}

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.group = group
        local = shard_size(num_embeddings, group)
        self.weight = nn.Parameter(torch.empty(local, features, device=device, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:  # [batch, seq] -> [batch, seq, features]
        if self.group.size() == 1:
            return functional.embedding(ids, self.weight)
        local_ids, elsewhere = _local_ids(ids, self.weight.shape[0], self.group)
        rows = functional.embedding(local_ids, self.weight).masked_fill(
            elsewhere.unsqueeze(-1), 0.0
        )
        return reduce_forward(rows, group=self.group)


def column_parallel_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    *,
    group: dist.ProcessGroup,
    weight_gradients: WeightGradients | None = None,
) -> Tensor:
    """The product x @ weight.T + bias for this rank's output features; the input gradient is whole.

    Weights are cast to the format of x, so float32 weights can serve bfloat16 activations.
    """
    if group.size() == 1 and weight_gradients is None:
        bias = None if bias is None else bias.to(x.dtype)
        return functional.linear(x, weight.to(x.dtype), bias)
    return _linear(x, weight, bias, group, weight_gradients)


def _linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    group: dist.ProcessGroup | None,
    weight_gradients: WeightGradients | None,
) -> Tensor:
    """The product x @ weight.T + bias; its input gradient is summed over the group."""
    put_off = None if weight_gradients is None else partial(weight_gradients.put_off, weight)
    bias = None if bias is None else bias.to(x.dtype)
    output: Tensor = _ColumnLinear.apply(  # type: ignore[no-untyped-call]
        x, weight.to(x.dtype), bias, group, put_off
    )
    return output


def reduce_forward(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """The sum of x over the group. May overwrite x. The gradient passes unchanged."""
    if group.size() == 1:
        return x
    output: Tensor = _ReduceForward.apply(x, group)  # type: ignore[no-untyped-call]
    return output


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """-log softmax(logits)[target] for each token, without ever gathering the logits.

    Shapes: logits [batch, seq, vocab / tp], targets [batch, seq] -> [batch, seq], in at least
    float32. Two all-reduces of a few numbers a token: the maximum, then the sum of the
    exponentials together with the target's logit.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if group.size() == 1:
        flat = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return flat.view_as(targets)
    losses: Tensor = _VocabCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, group
    )
    return losses


class _ColumnLinear(torch.autograd.Function):
    """Backward: the input gradient's all-reduce runs while the weight gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup | None,
        put_off: Callable[[Tensor, Tensor], bool] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.group, ctx.put_off = bias is not None, group, put_off
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_output,) = grads  # [..., out / tp]
        x, weight = ctx.saved_tensors
        grad_x = work = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_output @ weight
            work = None if ctx.group is None else start_all_reduce(grad_x, ctx.group)
        rows, x_rows = grad_output.flatten(0, -2), x.flatten(0, -2)
        later = ctx.put_off is not None and ctx.put_off(rows, x_rows)
        grad_weight = None if later else rows.t() @ x_rows
        grad_bias = rows.sum(0) if ctx.has_bias else None
        if work is not None:
            work.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _ReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
        largest = all_reduce(logits.amax(dim=-1), group, op=dist.ReduceOp.MAX)  # [batch, seq]
        shifted = logits - largest.unsqueeze(-1)
        local_ids, elsewhere = _local_ids(targets, logits.shape[-1], group)
        at_target = shifted.gather(-1, local_ids.unsqueeze(-1)).squeeze(-1)
        exponentials = shifted.exp_()  # in place: logits are the largest tensor of the model
        sums = torch.stack([exponentials.sum(-1), at_target.masked_fill(elsewhere, 0.0)])
        total, target_logit = all_reduce(sums, group)
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local_ids, elsewhere)
        losses: Tensor = total.log() - target_logit
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_losses,) = grads  # [batch, seq]
        softmax, local_ids, elsewhere = ctx.saved_tensors
        one_hot = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
        grad = softmax.scatter_add(-1, local_ids.unsqueeze(-1), -one_hot)
        return grad.mul_(grad_losses.unsqueeze(-1)), None, None


def _local_ids(ids: Tensor, local: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Ids counted from this rank's first row (0 where not held), and where they are not held."""
    shifted = ids - group.rank() * local
    elsewhere = (shifted < 0) | (shifted >= local)
    return shifted.masked_fill(elsewhere, 0), elsewhere
