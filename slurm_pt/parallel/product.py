"""The product of a split layer, with the messages of its backward pass between the computations.

Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
arXiv:2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.groups import start_all_gather, start_all_reduce, start_reduce_scatter
from slurm_pt.parallel.low_rank import LowRankUpdate
from slurm_pt.parallel.pending_backward import PendingBackward
from slurm_pt.parallel.weight_gradients import add_weight_gradient

Prepare = Callable[[Tensor], Tensor]
"""A cheap function in front of a product (a norm, a non-linearity), to be computed again in the
backward pass instead of keeping what it gave. Its parameters get their gradients."""


def parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    axis: TensorAxis,
    shared: bool,
    prepare: Prepare | None = None,
    update: LowRankUpdate | None = None,
) -> Tensor:
    """The product x @ weight.T + bias with this rank's part of a weight, [seq, batch, out / tp].

    x is [seq, batch, in]; if it is `shared` and its sequence split [seq / tp, batch, in]. The
    weight is cast to the format of x, so float32 weights can serve bfloat16 activations.

    With `shared` all tensor ranks have the same x (column-parallel), and its gradient is a sum
    over them; else nothing is summed here. With `prepare` the product is that of prepare(x),
    which the backward pass computes again from x. The `update` is added.
    """
    factors = [] if update is None else update.factors()
    output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, axis, shared and axis.tp > 1, prepare, update, *factors
    )
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
    """What a layer's product was taken of, computed once more for its backward pass.

    Without an x: it was not kept, since no gradient needs it.
    """

    def __init__(self, x: Tensor | None, prepare: Prepare | None):
        self.leaf, self.entered = x, x
        self.backward: PendingBackward | None = None
        if x is not None and prepare is not None:
            with torch.enable_grad():
                self.leaf = x.detach().requires_grad_()
                output = prepare(self.leaf)
                self.backward = PendingBackward(output)
            self.entered = output.detach()

    @property
    def kept(self) -> Tensor:
        if self.entered is None:
            raise ValueError("the input of this product was not kept for a gradient")
        return self.entered

    def gradient(self, grad_entered: Tensor | None) -> Tensor | None:
        """The gradient of x; those of what `prepare` holds are added to its parameters."""
        if self.backward is None or self.leaf is None or grad_entered is None:
            return grad_entered
        self.backward.run(grad_entered)
        gradient: Tensor | None = self.leaf.grad
        return gradient


class _Linear(torch.autograd.Function):
    """The product of `prepare(x)` and a weight, and the low-rank update beside it.

    With `shared` input (column-parallel) the input gradient's reduction over the ranks runs while
    the weight gradient is computed. With a split sequence the whole input is gathered again for
    the weight gradient, while the input gradient is computed: keeping it would undo what the split
    saves. The factor A of an update is spared that: the gradient of what it gives is a few numbers
    a token, and is summed to the part of the sequence whose input is here.

    A frozen weight gets no gradient, and its input is not kept for one.
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
        update: LowRankUpdate | None,
        *factors: Tensor,
    ) -> Tensor:
        ctx.axis, ctx.shared, ctx.prepare, ctx.update = axis, shared, prepare, update
        kept = x if weight.requires_grad or factors or prepare is not None else None
        x = x if prepare is None else prepare(x)
        if shared and axis.splits_sequence:
            x, work = _start_gather(x, axis)
            work.wait()
        bias = None if bias is None else bias.to(x.dtype)
        output = functional.linear(x, weight.to(x.dtype), bias)
        inner = None if update is None else update.add_to(output, x, factors)
        # As objects, to whose gradients something is added: what torch.utils.checkpoint gives back
        # of saved parameters are aliases with none.
        ctx.weight, ctx.factors = weight, factors
        ctx.save_for_backward(kept, inner)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_output,) = grads  # [seq, batch, out]
        (x, inner), weight, factors = ctx.saved_tensors, ctx.weight, ctx.factors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        axis: TensorAxis = ctx.axis
        update: LowRankUpdate | None = ctx.update
        split = ctx.shared and axis.splits_sequence
        again = _Again(x, ctx.prepare)
        grad_entered, grad_weight, reducing, gathering = None, None, None, None
        whole: Any = again.entered
        if needs_weight and split:
            whole, gathering = _start_gather(again.kept, axis)
        grad_inner: Any = None if update is None else update.inner_gradient(grad_output, factors)
        if needs_x:
            grad_entered = grad_output @ weight.to(grad_output.dtype)
            if update is not None:
                update.add_input_gradient(grad_entered, grad_inner, factors)
            if ctx.shared:
                grad_entered, reducing = _start_reduction(grad_entered, axis)
        if gathering is not None:
            gathering.wait()
        if needs_weight:
            grad_weight = _weight_gradient(weight, grad_output, whole, axis)
        grad_bias = grad_output.flatten(0, -2).sum(0) if needs_bias else None
        grad_factors: list[Tensor | None] = []
        if update is not None:
            if split:
                grad_inner, summing = _start_reduction(grad_inner, axis)
                summing.wait()
            terms = update.gradient_terms(factors, grad_output, grad_inner, inner, again.kept)
            grad_factors = [_weight_gradient(*term, axis) for term in terms]
        if reducing is not None:
            reducing.wait()
        grad_x = again.gradient(grad_entered)
        return grad_x, grad_weight, grad_bias, None, None, None, None, *grad_factors


def _start_gather(x: Tensor, axis: TensorAxis) -> tuple[Tensor, Any]:
    """The whole sequence, [seq, ...] of [seq / tp, ...], once the work has ended."""
    whole = x.new_empty((x.shape[0] * axis.tp, *x.shape[1:]))
    return whole, start_all_gather(whole, x.contiguous(), axis.peers)


def _start_reduction(x: Any, axis: TensorAxis) -> tuple[Tensor, Any]:
    """The sum over the ranks, or this rank's part of its sequence, once the work has ended."""
    if not axis.splits_sequence:
        return x, start_all_reduce(x, axis.peers)
    part = x.new_empty((x.shape[0] // axis.tp, *x.shape[1:]))
    return part, start_reduce_scatter(x.contiguous(), part, axis.peers)
