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

from slurm_pt.parallel.groups import ProcessGroups, all_reduce, start_all_reduce
from slurm_pt.parallel.shard import WHOLE, Shard
from slurm_pt.parallel.weight_gradients import WeightGradients, add_weight_gradient

Prepare = Callable[[Tensor], Tensor]
"""A cheap function in front of a product (a norm, a non-linearity), to be computed again in the
backward pass instead of keeping what it gave. Its parameters get their gradients."""


@dataclass(frozen=True)
class TensorAxis:
    """How layers are split: over which ranks, and whether the sequence is split between them."""

    tp: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """Not used while tp is 1: a model on one rank needs no torch.distributed."""
    sequence: bool = False
    """Between the blocks each rank holds its part of the sequence."""
    weight_gradients: WeightGradients | None = None
    """Asked by each layer's backward pass whether its weight gradient is to come later."""

    @classmethod
    def of(
        cls,
        groups: ProcessGroups,
        *,
        sequence: bool = False,
        weight_gradients: WeightGradients | None = None,
    ) -> TensorAxis:
        """The axis of a rank of a job."""
        tp, tp_rank = groups.layout.tp, groups.place.tp_rank
        return cls(tp, tp_rank, groups.tp, sequence, weight_gradients)

    @property
    def peers(self) -> dist.ProcessGroup:
        if self.group is None:
            raise ValueError("tensor parallelism over several ranks needs their process group")
        return self.group

    @property
    def splits_sequence(self) -> bool:
        return self.sequence and self.tp > 1

    def shard(self, dim: int, parts: int | None = None) -> Shard:
        """This rank's part along a dim."""
        return Shard.over(dim, tp=self.tp, tp_rank=self.rank, parts=parts)

    def own_positions(self, seq_len: int) -> slice:
        """The positions of a sequence that this rank holds between the blocks."""
        if not self.splits_sequence:
            return slice(0, seq_len)
        local = shard_size(seq_len, self.tp)
        return slice(local * self.rank, local * (self.rank + 1))


def shard_size(size: int, parts: int) -> int:
    """One of `parts` equal parts of a dimension."""
    if size % parts:
        raise ValueError(f"{size} cannot be split evenly into {parts} parts")
    return size // parts


@dataclass(frozen=True)
class StoredPart:
    """A piece of a parameter that is stored under a name of its own."""

    name: str
    """Relative to the module that holds the parameter; "../" leads to its parent."""
    rows: slice
    """Of the local parameter, along dim 0."""
    shard: Shard
    """Where these rows lie in the whole tensor of that name."""


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


class VocabParallelEmbedding(nn.Module):
    """Rows of a table by token id, with the ids split in contiguous ranges over the ranks."""

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        axis: TensorAxis,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.axis = axis
        local = shard_size(num_embeddings, axis.tp)
        self.weight = nn.Parameter(torch.empty(local, features, device=device, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:  # [seq, batch] -> [seq (/ tp), batch, features]
        if self.axis.tp == 1:
            return functional.embedding(ids, self.weight)
        local_ids, elsewhere = _local_ids(ids, self.weight.shape[0], self.axis)
        rows = functional.embedding(local_ids, self.weight).masked_fill(
            elsewhere.unsqueeze(-1), 0.0
        )
        return sum_over_ranks(rows, axis=self.axis)

    def stored_parts(self, parameter: str) -> list[StoredPart]:
        return [StoredPart(parameter, slice(None), self.axis.shard(0))]


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


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, *, axis: TensorAxis) -> Tensor:
    """-log softmax(logits)[target] for each token, without ever gathering the logits.

    Shapes: logits [seq, batch, vocab / tp], targets [seq, batch] -> [seq, batch], in at least
    float32. Two all-reduces of a few numbers a token: the maximum, then the sum of the
    exponentials together with the target's logit.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if axis.tp == 1:
        flat = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return flat.view_as(targets)
    losses: Tensor = _VocabCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, axis
    )
    return losses


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
    if weight.grad is None or weight.grad.dtype != rows.dtype:
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


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: TensorAxis) -> Tensor:
        group = axis.peers
        largest = all_reduce(logits.amax(dim=-1), group, op=dist.ReduceOp.MAX)  # [seq, batch]
        shifted = logits - largest.unsqueeze(-1)
        local_ids, elsewhere = _local_ids(targets, logits.shape[-1], axis)
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
        (grad_losses,) = grads  # [seq, batch]
        softmax, local_ids, elsewhere = ctx.saved_tensors
        one_hot = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
        grad = softmax.scatter_add(-1, local_ids.unsqueeze(-1), -one_hot)
        return grad.mul_(grad_losses.unsqueeze(-1)), None, None


def _local_ids(ids: Tensor, local: int, axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """Ids counted from this rank's first row (0 where not held), and where they are not held."""
    shifted = ids - axis.rank * local
    elsewhere = (shifted < 0) | (shifted >= local)
    return shifted.masked_fill(elsewhere, 0), elsewhere
