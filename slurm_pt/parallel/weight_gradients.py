"""Weight gradients that are computed later than the gradients of the inputs.

A zero-bubble schedule splits a backward pass in two. The input pass gives the stage before what it
waits for; the matrix products that give the weights' gradients, which nobody waits for, fill the
time when a stage would stand idle.

Source: Qi et al. 2023, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


_WATCHERS = "slurm_pt_gradient_watchers"
"""Attribute of a parameter."""


class WeightGradients:
    """Takes weight gradients from the layers' backward passes while a pipeline collects them.

    Layers get it when they are made. Outside of `collect` it takes nothing, so the same layers
    serve every schedule.
    """

    def __init__(self) -> None:
        self._collected: list[Callable[[], None]] | None = None

    @contextmanager
    def collect(self) -> Iterator[list[Callable[[], None]]]:
        """Within it, what layers want to put off goes into the list that this gives."""
        collected: list[Callable[[], None]] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None

    def put_off(self, parameter: Tensor, grad_output: Tensor, x: Tensor) -> bool:
        """Whether `grad_output.T @ x` will be added to `parameter.grad` later.

        False: compute it now, and give it to autograd. Shapes: grad_output [rows, out], x
        [rows, in], parameter [out, in]. A bfloat16 product goes into a float32 gradient.
        """
        if self._collected is None:
            return False
        if not parameter.requires_grad:
            raise TypeError(
                "a parameter is needed: what is added to another tensor's gradient would be lost"
            )

        def compute() -> None:
            add_weight_gradient(parameter, grad_output, x)

        self._collected.append(compute)
        return True


@torch.no_grad()
def add_weight_gradient(parameter: Tensor, grad_output: Tensor, x: Tensor) -> None:
    """Add `grad_output.T @ x` to `parameter.grad`; shapes as for `put_off`."""
    if parameter.grad is None:
        parameter.grad = (grad_output.t() @ x).to(parameter.dtype)
    elif parameter.grad.dtype == x.dtype:
        parameter.grad.addmm_(grad_output.t(), x)
    else:
        parameter.grad.add_(grad_output.t() @ x)
    _tell_watchers(parameter)


@torch.no_grad()
def add_row_gradient(table: Tensor, ids: Tensor, grad_rows: Tensor) -> None:
    """Add the gradients of looked-up rows to `table.grad`, which must be there.

    Shapes: table [rows, features], ids [...], grad_rows [..., features].
    """
    if table.grad is None:
        raise ValueError("the table has no gradient to add to")
    # Not index_add_: on a GPU its order of summation differs from call to call.
    table.grad.index_put_((ids,), grad_rows, accumulate=True)
    _tell_watchers(table)


def _tell_watchers(parameter: Tensor) -> None:
    for watcher in getattr(parameter, _WATCHERS, ()):
        watcher()


def watch_gradient(parameter: Tensor, watcher: Callable[[], None]) -> None:
    """Call `watcher` whenever one of the functions above has added to the parameter's gradient.

    Autograd's own hooks do not see that.
    """
    setattr(parameter, _WATCHERS, (*getattr(parameter, _WATCHERS, ()), watcher))
