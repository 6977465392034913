"""The parts of one optimizer step on this rank, and of an evaluation.

A step makes one collective over all ranks: a few float64 numbers that carry the gradient norm, the
loss, and whether anyone asked to stop or to save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurm_pt.errors import ConfigError, DivergedError, Problem
from slurm_pt.parallel.data import (
    GradientBuckets,
    clip_factor,
    counts_here,
    squared_norm,
    sum_gradients,
    sum_tied_gradient,
)
from slurm_pt.parallel.groups import ProcessGroups, all_reduce
from slurm_pt.parallel.pipeline import Message, run_forward_pipeline, run_pipeline
from slurm_pt.training.feed import Feed
from slurm_pt.training.loss_scale import LossScale
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.optimizer import NamedAdamW
from slurm_pt.training.rank_model import RankModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.config.schema import TrainConfig
    from slurm_pt.training.data import TokenDataset


def num_microbatches(config: TrainConfig, dp: int) -> int:
    """Forward passes of one rank in one step."""
    count, left_over = divmod(config.global_batch_size, config.micro_batch_size * dp)
    if left_over or count == 0:
        multiple = config.micro_batch_size * dp
        raise ConfigError(
            [
                Problem(
                    key="train.global_batch_size",
                    value=config.global_batch_size,
                    rule=f"not a multiple of train.micro_batch_size={config.micro_batch_size} "
                    f"* parallel.dp={dp}",
                    fix=f"set it to a multiple of {multiple}",
                )
            ]
        )
    return count


@dataclass(frozen=True)
class Totals:
    """What all ranks know after the one reduction of a step."""

    loss: float
    grad_norm: float
    stop: bool
    save: bool
    blank: bool
    """Some rank had no tokens: this step does not count."""


@dataclass(frozen=True)
class Evaluation:
    """What all ranks know after looking at the held-out tokens."""

    loss: float | None
    """None: broken off by a wish to stop."""
    stop: bool


class TrainStep:
    """The parts of one step."""

    def __init__(
        self,
        model: RankModel,
        optimizer: NamedAdamW,
        dataset: TokenDataset,
        config: TrainConfig,
        groups: ProcessGroups,
        phase: Callable[[str], None],
        loss_scale: LossScale,
    ):
        self.model, self.optimizer, self.loss_scale = model, optimizer, loss_scale
        self.config, self.groups, self.phase = config, groups, phase
        self.num_microbatches = num_microbatches(config, groups.layout.dp)
        self.feed = Feed(dataset, config, groups, num_microbatches=self.num_microbatches)
        self.buckets = GradientBuckets(model.trained_parameters().values(), group=groups.dp)
        self.counted, self.copies = _counted_gradients(model, groups)
        shape = model.message_shape(
            micro_batch_size=config.micro_batch_size, seq_len=config.seq_len
        )
        self.message = Message(shape=shape, dtype=model.dtype)

    def gradients(self, micro_batches: list[MicroBatch]) -> Tensor:
        """This rank's part of the mean loss; leaves the global batch's gradients in `.grad`.

        The gradients are those of the scaled loss.
        """
        self.phase("forward_backward")
        self.buckets.start_step()
        loss = run_pipeline(
            self.model.chunks,
            micro_batches,
            message=self.message,
            groups=self.groups,
            schedule=self.model.schedule,
            weight_gradients=self.model.weight_gradients,
            # Replicas' gradients are summed: each gives its share of the mean.
            loss_scale=self.loss_scale.factor / self.groups.layout.dp,
        )
        self.phase("average")
        self.buckets.finish_sum()
        partial = self.model.partial_gradients()
        sum_gradients([p.grad for p in partial if p.grad is not None], self.groups.tp)
        sum_gradients(self.model.shared_gradients(), self.groups.kv)
        sum_tied_gradient(self.model.tied_parameter(), self.groups)
        if self.groups.place.tp_rank != 0:  # each tp rank has the whole loss: count it once
            loss.zero_()
        return loss / self.groups.layout.dp

    def reduce(self, loss: Tensor, *, stop: bool, save: bool, blank: bool) -> Totals:
        """The one collective over all ranks."""
        device = self.groups.device
        square = squared_norm(self.counted, device=device)
        # 0 times a number is 0, but for those that are not finite: they spoil the sum.
        square += 0.0 * squared_norm(self.copies, device=device)
        flags = torch.tensor([stop, save, blank], dtype=torch.float64)
        sums = torch.cat([torch.stack([loss, square]), flags.to(device)])
        loss_sum, square_sum, *raised = all_reduce(sums, self.groups.world).tolist()
        stops, saves, blanks = (count > 0 for count in raised)
        grad_norm = math.sqrt(square_sum) / self.loss_scale.factor
        return Totals(loss=loss_sum, grad_norm=grad_norm, stop=stops, save=saves, blank=blanks)

    def evaluate(self, stop_requested: Callable[[], bool]) -> Evaluation:
        """The mean loss of the held-out batches, without dropout.

        Between two of them ranks agree whether to go on: a long evaluation must not use up a
        preempted job's grace.
        """
        self.model.train(False)
        loss_sum = 0.0
        for number in range(self.config.eval_batches):
            loss = run_forward_pipeline(
                self.model.chunks,
                self.feed.validation(number),
                message=self.message,
                groups=self.groups,
            )
            if self.groups.place.tp_rank != 0:  # as in a step: count it once
                loss.zero_()
            stop = torch.full_like(loss, float(stop_requested()))
            sums = torch.stack([loss / self.groups.layout.dp, stop])
            batch_loss, stops = all_reduce(sums, self.groups.world).tolist()
            if stops > 0:
                self.model.train(True)
                return Evaluation(loss=None, stop=True)
            loss_sum += batch_loss
        self.model.train(True)
        return Evaluation(loss=loss_sum / self.config.eval_batches, stop=False)

    def update(self, grad_norm: float, lr: float) -> bool:
        """Whether the weights were changed: not if a float16 gradient overflowed on any rank.

        Raises DivergedError for a norm that is not finite in other formats, before the weights
        are touched.
        """
        overflow = not math.isfinite(grad_norm)
        if overflow and not self.loss_scale.is_dynamic:
            raise DivergedError(
                f"the gradient norm is {grad_norm}: the training has diverged. The weights were "
                "left as they were, and checkpoints from before are whole. Lower train.lr, set "
                "train.grad_clip or more train.warmup_steps, or look for damaged data"
            )
        if not overflow:
            factor = clip_factor(grad_norm, self.config.grad_clip) / self.loss_scale.factor
            if factor != 1.0:
                self.buckets.scale(factor)
            self.optimizer.step(lr)
        self.loss_scale.note(overflow=overflow)
        return not overflow


def _counted_gradients(
    model: RankModel, groups: ProcessGroups
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that this rank counts in the norm, and those a tensor rank counts for it.

    Views into the buckets. A tied copy counts nowhere: the embedding on the first stage has the
    same gradient.
    """
    parameters, tied = dict(model.named_parameters()), model.tied_copies()
    counted, copies = [], []
    for piece in model.trained_pieces():
        gradient = parameters[piece.parameter].grad
        if gradient is None:
            raise ValueError(f"{piece.parameter} has no gradient buffer")
        if piece.parameter in tied:
            continue
        if counts_here(piece.shard, groups):
            counted.append(piece.of(gradient))
        elif groups.place.dp_rank == 0:
            copies.append(piece.of(gradient))
    return counted, copies
