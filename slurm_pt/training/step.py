"""The parts of one optimizer step on this rank, and of an evaluation.

A step makes one collective over all ranks: a few float64 numbers that carry the gradient norm, the
loss, and whether anyone asked to stop or to save.

In a local step (`LocalUpdates`) gradients, norm and update are those of one replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurm_pt.config.batch_rules import num_microbatches
from slurm_pt.errors import DivergedError
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
from slurm_pt.parallel.reduction import Reduction
from slurm_pt.training.feed import Feed
from slurm_pt.training.local_updates import LocalUpdates
from slurm_pt.training.loss_scale import LossScale
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.optimizer import NamedAdamW
from slurm_pt.training.rank_model import RankModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.config.schema import TrainConfig
    from slurm_pt.training.data import TokenDataset


@dataclass(frozen=True)
class Totals:
    """What all ranks know after the one reduction of a step."""

    loss: float
    grad_norm: float
    """Of a local step: the root of the mean square over the replicas."""
    replica_norm: float
    """Gradient norm of this rank's own replica; all have the same unless the step is local."""
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
        reduction: Reduction | None = None,
        local: LocalUpdates | None = None,
    ):
        self.model, self.optimizer, self.loss_scale = model, optimizer, loss_scale
        self.local = local
        self.config, self.groups, self.phase = config, groups, phase
        self.num_microbatches = num_microbatches(config, groups.layout.dp)
        self.feed = Feed(dataset, config, groups, num_microbatches=self.num_microbatches)
        self.buckets = GradientBuckets(
            model.parameters(), group=groups.dp, reduction=reduction, sharding=model.sharding
        )
        # All that follows a sum over dp concerns what is owned here alone.
        owned, tied = self.buckets.owned, model.tied_parameter()
        partial = [p.grad for p in model.partial_gradients() if p.grad is not None]
        self.partial = [owned(gradient) for gradient in partial]
        self.shared = [owned(gradient) for gradient in model.shared_gradients()]
        self.tied = None if tied is None or tied.grad is None else owned(tied.grad)
        self.counted, self.copies = _counted_gradients(model, groups)
        shape = model.message_shape(
            micro_batch_size=config.micro_batch_size, seq_len=config.seq_len
        )
        self.message = Message(shape=shape, dtype=model.dtype)

    def is_local(self, step: int) -> bool:
        """Whether the update that follows `step` completed ones is each replica's own."""
        return self.local is not None and self.local.is_local(step)

    def gradients(self, step: int, micro_batches: list[MicroBatch]) -> Tensor:
        """This rank's part of the mean loss; leaves the global batch's gradients in `.grad`.

        The gradients are those of the scaled loss, and whole where this replica owns them; in a
        local step those of the replica's part of the batch.
        """
        alone = self.is_local(step)
        self.phase("forward_backward")
        self.buckets.start_step(step, alone=alone)
        loss = run_pipeline(
            self.model.chunks,
            micro_batches,
            message=self.message,
            groups=self.groups,
            schedule=self.model.schedule,
            weight_gradients=self.model.weight_gradients,
            # Replicas' gradients are summed: each gives its share of the mean.
            loss_scale=self.loss_scale.factor / (1 if alone else self.groups.layout.dp),
        )
        self.phase("average")
        self.buckets.finish_sum()
        sum_gradients(self.partial, self.groups.tp)
        sum_gradients(self.shared, self.groups.kv)
        sum_tied_gradient(self.tied, self.groups)
        if self.groups.place.tp_rank != 0:  # each tp rank has the whole loss: count it once
            loss.zero_()
        return loss / self.groups.layout.dp

    def reduce(self, step: int, loss: Tensor, *, stop: bool, save: bool, blank: bool) -> Totals:
        """The one collective over all ranks."""
        device, place = self.groups.device, self.groups.place
        # Replicas have one norm together, or in a local step each its own: a number for each.
        norms, own = (self.groups.layout.dp, place.dp_rank) if self.is_local(step) else (1, 0)
        squares = torch.zeros(norms, dtype=torch.float64, device=device)
        if norms > 1 or self.model.sharding is not None or place.dp_rank == 0:
            # 0 times a number is 0, but for those that are not finite: they spoil the sum.
            spoilt = 0.0 * squared_norm(self.copies, device=device)
            squares[own] = squared_norm(self.counted, device=device) + spoilt
        flags = torch.tensor([stop, save, blank], dtype=torch.float64)
        sums = torch.cat([torch.stack([loss]), squares, flags.to(device)])
        loss_sum, *rest = all_reduce(sums, self.groups.world).tolist()
        stops, saves, blanks = (count > 0 for count in rest[norms:])
        factor = self.loss_scale.factor
        return Totals(
            loss=loss_sum,
            grad_norm=math.sqrt(sum(rest[:norms]) / norms) / factor,
            replica_norm=math.sqrt(rest[own]) / factor,
            stop=stops,
            save=saves,
            blank=blanks,
        )

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

    def update(self, totals: Totals, lr: float) -> bool:
        """Whether the weights were changed: not if a float16 gradient overflowed on any rank.

        Raises DivergedError for a norm that is not finite in other formats, before the weights
        are touched.
        """
        overflow = not math.isfinite(totals.grad_norm)
        if overflow and not self.loss_scale.is_dynamic:
            raise DivergedError(
                f"the gradient norm is {totals.grad_norm}: the training has diverged. The weights "
                "were left as they were, and checkpoints from before are whole. Lower train.lr, "
                "set train.grad_clip or more train.warmup_steps, or look for damaged data"
            )
        if not overflow:
            clip = clip_factor(totals.replica_norm, self.config.grad_clip)
            factor = clip / self.loss_scale.factor
            if factor != 1.0:
                self.buckets.scale(factor)
            self.optimizer.step(lr)
            if self.model.sharding is not None:
                self.model.sharding.gather()
            self.buckets.reduction.keep()
        self.loss_scale.note(overflow=overflow)
        return not overflow

    def synchronise(self, step: int) -> None:
        """After the update that follows `step` completed ones: replicas agree, where it is time."""
        if self.local is not None:
            self.phase("synchronise")
            self.local.synchronise_if_due(step)


def _counted_gradients(
    model: RankModel, groups: ProcessGroups
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that this rank counts in its replica's norm, and those another counts for it.

    Views into the buckets, of what is owned here. A tied copy counts nowhere: the embedding on the
    first stage has the same gradient.
    """
    parameters, tied = dict(model.named_parameters()), model.tied_copies()
    counted, copies = [], []
    for piece in model.pieces():
        gradient = parameters[piece.parameter].grad
        if gradient is None:
            raise ValueError(f"{piece.parameter} has no gradient buffer")
        if piece.parameter in tied:
            continue
        if counts_here(piece.shard, groups):
            counted.append(model.owned(piece.of(gradient)))
        else:
            copies.append(model.owned(piece.of(gradient)))
    return counted, copies
