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
from slurm_pt.parallel.data import clip_factor
from slurm_pt.parallel.gradients import Gradients
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
        self.held = Gradients(model, groups, reduction=reduction, sharding=model.sharding)
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
        self.held.start_step(len(micro_batches), step=step, alone=alone)
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
        self.held.finish()
        if self.groups.place.tp_rank != 0:  # each tp rank has the whole loss: count it once
            loss.zero_()
        return loss / self.groups.layout.dp

    def reduce(self, step: int, loss: Tensor, *, stop: bool, save: bool, blank: bool) -> Totals:
        """The one collective over all ranks."""
        squares = self.held.squares(alone=self.is_local(step))
        flags = torch.tensor([stop, save, blank], dtype=torch.float64)
        sums = torch.cat([torch.stack([loss]), squares, flags.to(self.groups.device)])
        loss_sum, *rest = all_reduce(sums, self.groups.world).tolist()
        norms, factor = len(squares), self.loss_scale.factor
        stops, saves, blanks = (count > 0 for count in rest[norms:])
        return Totals(
            loss=loss_sum,
            grad_norm=math.sqrt(sum(rest[:norms]) / norms) / factor,
            replica_norm=math.sqrt(rest[self.groups.place.dp_rank % norms]) / factor,
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
                self.held.scale(factor)
            self.optimizer.step(lr)
            if self.model.sharding is not None:
                self.model.sharding.gather()
            self.held.buckets.reduction.keep()
        self.loss_scale.note(overflow=overflow)
        return not overflow

    def synchronise(self, step: int) -> None:
        """After the update that follows `step` completed ones: replicas agree, where it is time."""
        if self.local is not None:
            self.phase("synchronise")
            self.local.synchronise_if_due(step)
