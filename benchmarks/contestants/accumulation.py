"""The step that plain torch contestants have in common: gradients of micro-batches add up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch.distributed as dist

from benchmarks.contestants import Train, stepwise
from benchmarks.reference import adamw, clip_gradients, gradients_of, mean_loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchmarks.trial import Trial


def train_share(
    trial: Trial,
    model: nn.Module,
    *,
    before_last: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Train:
    """Steps of each rank on its share of the batch.

    `before_last` is around the passes of all micro-batches but the last.
    """

    def clip() -> None:
        clip_gradients(gradients_of(model.parameters()), trial.grad_clip)

    def micro_batches(batch: Tensor) -> tuple[Tensor, ...]:
        share = batch.chunk(dist.get_world_size())[dist.get_rank()]
        return share.split(trial.micro_batch_size)

    return accumulate(trial, model, micro_batches, clip=clip, before_last=before_last)


def accumulate(
    trial: Trial,
    model: nn.Module,
    micro_batches: Callable[[Tensor], tuple[Tensor, ...]],
    *,
    clip: Callable[[], None],
    before_last: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    number: Callable[[Tensor], float] = float,
) -> Train:
    """Steps of AdamW on the mean loss of a batch's micro-batches.

    `around` is around all passes of a step; `number` takes the value out of a loss.
    """
    optimizer = adamw(trial, model.parameters())

    def step(batch: Tensor) -> float:
        parts = micro_batches(batch)
        optimizer.zero_grad()
        total = 0.0
        with around():
            for index, tokens in enumerate(parts):
                last = index == len(parts) - 1
                with contextlib.nullcontext() if last else before_last():
                    loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:]) / len(parts)
                    loss.backward()
                total += number(loss.detach())
        clip()
        optimizer.step()
        return total

    return stepwise(step)
