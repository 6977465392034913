"""A backward pass that begins with a gradient which is known later.

It keeps no more of the output than its place in the graph. `torch.autograd.backward(output,
gradient)` gives the same, but compares shapes as symbols: its first call imports sympy, which
takes every rank most of a second at each start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class PendingBackward:
    """The backward pass of `output`, to be run once."""

    def __init__(self, output: Tensor):
        self._gradients: list[Tensor] = []
        """The one that was given; also held by the graph."""
        self._edge: GradientEdge | None = None
        if output.requires_grad:  # else all before it is frozen
            start: Tensor = _Start.apply(output, self._gradients)  # type: ignore[no-untyped-call]
            self._edge = get_gradient_edge(start)

    def run(self, gradient: Tensor) -> None:
        """Add to the gradients of all leaves, with `gradient` as that of the output."""
        if self._edge is None:
            return
        self._gradients.append(gradient)
        torch.autograd.backward((self._edge,))


class _Start(torch.autograd.Function):
    """A number that depends on the output; its backward pass gives what is in the list."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.gradients.pop(), None
