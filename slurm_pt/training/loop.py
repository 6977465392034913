"""The loop of optimizer steps. Everything it does is a function of the step number.

A step makes one collective over all ranks: a few float64 numbers that carry the gradient norm,
the loss, and whether anyone asked to stop or to save. So all ranks know the loss, and all agree
on the same last step.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurm_pt.errors import ConfigError, Problem
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
from slurm_pt.training.feed import Feed, HostBatch
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.optimizer import NamedAdamW, learning_rate
from slurm_pt.training.rank_model import RankModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.config.schema import TrainConfig
    from slurm_pt.training.data import TokenDataset
    from slurm_pt.training.prefetch import Prefetcher


@dataclass(frozen=True)
class StepRecord:
    """What one step did. The same on all ranks, but for the durations."""

    step: int
    """Completed steps, this one included."""
    loss: float
    """Mean over the tokens of the global batch, before the update."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Over all ranks."""
    step_s: float
    """Without the time of a save that follows."""
    data_s: float
    """Part of step_s spent waiting for tokens."""
    eval_loss: float | None = None
    """Mean over the held-out tokens, after the update; None on steps without an evaluation."""


@dataclass(frozen=True)
class LoopEnd:
    """Why and where the loop ended."""

    step: int
    """Completed steps."""
    stopped: bool
    """Left on request, with steps still to do."""


def train_loop(
    *,
    model: RankModel,
    optimizer: NamedAdamW,
    dataset: TokenDataset,
    config: TrainConfig,
    groups: ProcessGroups,
    start_step: int,
    stop_requested: Callable[[], bool],
    save_due: Callable[[], bool],
    save: Callable[[int], None],
    record: Callable[[StepRecord], None],
    phase: Callable[[str], None],
    prefetch: int = 0,
) -> LoopEnd:
    """Train from `start_step` completed steps to `config.steps`, or until a stop is agreed.

    `stop_requested` of any rank counts, `save_due` of rank 0 alone. `save(step)` is called on
    all ranks with the number of completed steps, between steps only: after the last step, and
    on a stop, saving is the caller's. A thread has the tokens of up to `prefetch` steps ready.

    A rank that is asked to stop while it waits for tokens does not wait on: it goes through the
    step with blank ones, and says so in the reduction. No rank then counts that step.
    """
    trainer = _Trainer(model, optimizer, dataset, config, groups, phase)
    steps = range(start_step, config.steps)
    with trainer.feed.ahead(steps, prefetch=prefetch) as data:
        return _steps(trainer, data, steps, stop_requested, save_due, save, record)


def _steps(
    trainer: _Trainer,
    data: Prefetcher[HostBatch],
    steps: range,
    stop_requested: Callable[[], bool],
    save_due: Callable[[], bool],
    save: Callable[[int], None],
    record: Callable[[StepRecord], None],
) -> LoopEnd:
    config, groups, phase = trainer.config, trainer.groups, trainer.phase
    for step in steps:
        begin = time.perf_counter()
        phase("data")
        micro_batches = trainer.feed.take(step, data, give_up=stop_requested)
        data_s = time.perf_counter() - begin
        blank = micro_batches is None
        loss = trainer.gradients(micro_batches or trainer.feed.blank(step))
        phase("reduce")
        wants_save = groups.rank == 0 and save_due()
        totals = trainer.reduce(loss, stop=stop_requested(), save=wants_save, blank=blank)
        if totals.blank:
            return LoopEnd(step=step, stopped=True)
        phase("optimizer")
        lr = learning_rate(step, config)
        trainer.update(totals.grad_norm, lr)
        step_s = time.perf_counter() - begin
        evaluation = _Evaluation(loss=None, stop=totals.stop)
        if not totals.stop and _is_evaluated(step + 1, config):
            phase("evaluate")
            evaluation = trainer.evaluate(stop_requested)
        record(
            StepRecord(
                step=step + 1,
                loss=totals.loss,
                grad_norm=totals.grad_norm,
                lr=lr,
                tokens=config.global_batch_size * config.seq_len,
                step_s=step_s,
                data_s=data_s,
                eval_loss=evaluation.loss,
            )
        )
        if step + 1 == config.steps:
            break
        if evaluation.stop:
            return LoopEnd(step=step + 1, stopped=True)
        if totals.save:
            phase("save")
            save(step + 1)
    return LoopEnd(step=max(steps.start, config.steps), stopped=False)


def _is_evaluated(step: int, config: TrainConfig) -> bool:
    """Whether the held-out tokens are looked at after this many steps; always after the last."""
    interval = config.eval_interval
    return interval is not None and (step % interval == 0 or step == config.steps)


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
class _Totals:
    """What all ranks know after the one reduction of a step."""

    loss: float
    grad_norm: float
    stop: bool
    save: bool
    blank: bool
    """Some rank had no tokens: this step does not count."""


@dataclass(frozen=True)
class _Evaluation:
    """What all ranks know after looking at the held-out tokens."""

    loss: float | None
    """None: broken off by a wish to stop."""
    stop: bool


class _Trainer:
    """The parts of one step."""

    def __init__(
        self,
        model: RankModel,
        optimizer: NamedAdamW,
        dataset: TokenDataset,
        config: TrainConfig,
        groups: ProcessGroups,
        phase: Callable[[str], None],
    ):
        self.model, self.optimizer = model, optimizer
        self.config, self.groups, self.phase = config, groups, phase
        self.num_microbatches = num_microbatches(config, groups.layout.dp)
        self.feed = Feed(dataset, config, groups, num_microbatches=self.num_microbatches)
        self.buckets = GradientBuckets(model.parameters(), group=groups.dp)
        self.counted = _counted_gradients(model, groups)
        shape = model.message_shape(
            micro_batch_size=config.micro_batch_size, seq_len=config.seq_len
        )
        self.message = Message(shape=shape, dtype=model.dtype)

    def gradients(self, micro_batches: list[MicroBatch]) -> Tensor:
        """This rank's part of the mean loss; leaves the global batch's gradients in `.grad`."""
        self.phase("forward_backward")
        self.buckets.zero()
        loss = run_pipeline(
            self.model.chunks,
            micro_batches,
            message=self.message,
            groups=self.groups,
            schedule=self.model.schedule,
            weight_gradients=self.model.weight_gradients,
        )
        self.phase("average")
        partial = self.model.partial_gradients()
        sum_gradients([p.grad for p in partial if p.grad is not None], self.groups.tp)
        sum_gradients(self.model.shared_gradients(), self.groups.kv)
        self.buckets.average()
        sum_tied_gradient(self.model.tied_parameter(), self.groups)
        if self.groups.place.tp_rank != 0:  # each tp rank has the whole loss: count it once
            loss.zero_()
        return loss / self.groups.layout.dp

    def reduce(self, loss: Tensor, *, stop: bool, save: bool, blank: bool) -> _Totals:
        """The one collective over all ranks."""
        square = squared_norm(self.counted, device=self.groups.device)
        flags = torch.tensor([stop, save, blank], dtype=torch.float64)
        sums = torch.cat([torch.stack([loss, square]), flags.to(self.groups.device)])
        loss_sum, square_sum, *raised = all_reduce(sums, self.groups.world).tolist()
        stops, saves, blanks = (count > 0 for count in raised)
        return _Totals(
            loss=loss_sum, grad_norm=math.sqrt(square_sum), stop=stops, save=saves, blank=blanks
        )

    def evaluate(self, stop_requested: Callable[[], bool]) -> _Evaluation:
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
                return _Evaluation(loss=None, stop=True)
            loss_sum += batch_loss
        self.model.train(True)
        return _Evaluation(loss=loss_sum / self.config.eval_batches, stop=False)

    def update(self, grad_norm: float, lr: float) -> None:
        factor = clip_factor(grad_norm, self.config.grad_clip)
        if factor != 1.0:
            self.buckets.scale(factor)
        self.optimizer.step(lr)


def _counted_gradients(model: RankModel, groups: ProcessGroups) -> list[Tensor]:
    """The gradients that this rank counts in the global norm: views into the buckets.

    A tied copy counts nowhere: the embedding on the first stage has the same gradient.
    """
    parameters, copies = dict(model.named_parameters()), model.tied_copies()
    counted = []
    for piece in model.pieces():
        gradient = parameters[piece.parameter].grad
        if gradient is None:
            raise ValueError(f"{piece.parameter} has no gradient buffer")
        if piece.parameter not in copies and counts_here(piece.shard, groups):
            counted.append(piece.of(gradient))
    return counted
