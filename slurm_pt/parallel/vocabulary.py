"""The token embedding and the loss with the vocabulary split over the tensor group.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from slurm_pt.parallel.axis import StoredPart, TensorAxis, shard_size
from slurm_pt.parallel.groups import ProcessGroups, all_reduce
from slurm_pt.parallel.tensor import sum_over_ranks
from slurm_pt.parallel.weight_gradients import add_row_gradient


class VocabParallelEmbedding(nn.Module):
    """Rows of a table by token id, with the ids split in contiguous ranges over the ranks.

    A table in host memory (`device`) is looked up there, and the rows go to where the ids are.
    """

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
            return self._rows(ids)
        local_ids, elsewhere = _local_ids(ids, self.weight.shape[0], self.axis)
        rows = self._rows(local_ids).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return sum_over_ranks(rows, axis=self.axis)

    def _rows(self, ids: Tensor) -> Tensor:
        return _lookup(ids.to(self.weight.device), self.weight, self.axis).to(ids.device)

    def stored_parts(self, parameter: str) -> list[StoredPart]:
        return [StoredPart(parameter, slice(None), self.axis.shard(0))]


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, *, axis: TensorAxis) -> Tensor:
    """-log softmax(logits)[target] for each token, without ever gathering the logits.

    Shapes: logits [seq, batch, vocab / tp], targets [seq, batch] -> [seq, batch], in at least
    float32. Two all-reduces of a few numbers a token: the maximum, then the sum of the
    exponentials together with the target's logit.

    Overwrites the logits: they are the largest tensor of a step, and one of them is enough for
    the forward and the backward pass.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses: Tensor = _VocabCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, axis
    )
    return losses


def cross_entropy(
    logits: Tensor, targets: Tensor, groups: ProcessGroups, *, ignore_index: int = -100
) -> Tensor:
    """The mean of -log softmax(logits)[target] over the targets that are not `ignore_index`.

    Shapes: logits [..., vocab / tp], as a layer with the role column gives them, targets [...].
    They are never gathered. A scalar, the same on all tensor ranks.
    """
    losses = vocab_parallel_cross_entropy(logits, targets, axis=TensorAxis.of(groups))
    counted = targets != ignore_index
    return losses.masked_fill(~counted, 0.0).sum() / counted.sum()


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: TensorAxis) -> Tensor:
        largest = logits.amax(dim=-1)  # [seq, batch]
        if axis.tp > 1:
            all_reduce(largest, axis.peers, op=dist.ReduceOp.MAX)
        shifted = logits.sub_(largest.unsqueeze(-1))
        local_ids, elsewhere = _local_ids(targets, logits.shape[-1], axis)
        at_target = shifted.gather(-1, local_ids.unsqueeze(-1)).squeeze(-1)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), at_target.masked_fill(elsewhere, 0.0)])
        total, target_logit = all_reduce(sums, axis.peers) if axis.tp > 1 else sums
        ctx.save_for_backward(exponentials, total, local_ids, elsewhere)
        losses: Tensor = total.log() - target_logit
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_losses,) = grads  # [seq, batch]
        exponentials, total, local_ids, elsewhere = ctx.saved_tensors
        # (softmax - one_hot) * grad_losses
        grad = exponentials.mul_((grad_losses / total).unsqueeze(-1))
        at_target = grad_losses.masked_fill(elsewhere, 0.0)
        grad.scatter_add_(-1, local_ids.unsqueeze(-1), -at_target.unsqueeze(-1))
        return grad, None, None


def _lookup(ids: Tensor, weight: Tensor, axis: TensorAxis) -> Tensor:
    """Rows of a table; the gradient is added to the rows that were looked up, and to no others."""
    rows: Tensor = (
        _Lookup.apply(ids, weight)  # type: ignore[no-untyped-call]
        if axis.adds_gradients
        else functional.embedding(ids, weight)
    )
    return rows


class _Lookup(torch.autograd.Function):
    """torch's own makes a zeroed gradient of the whole table for every micro-batch."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight  # as an object: see parallel.product
        ctx.save_for_backward(ids)
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_rows,) = grads
        (ids,), weight = ctx.saved_tensors, ctx.weight
        if weight.grad is None:
            grad = torch.zeros_like(weight)
            return None, grad.index_put_((ids,), grad_rows, accumulate=True)
        add_row_gradient(weight, ids, grad_rows)
        return None, None


def _local_ids(ids: Tensor, local: int, axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """Ids counted from this rank's first row (0 where not held), and where they are not held."""
    shifted = ids - axis.rank * local
    elsewhere = (shifted < 0) | (shifted >= local)
    return shifted.masked_fill(elsewhere, 0), elsewhere
