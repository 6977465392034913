"""The parts of one optimizer step on this rank, and of an evaluation.

A step makes one collective over all ranks: a few float64 numbers that carry the gradient norm, the
loss, and whether anyone asked to stop or to save.

In a local step (`LocalUpdates`) gradients, norm and update are those of one replica.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from slurm_pt.config.batch_rules import num_microbatches
from slurm_pt.parallel.gradient_buckets import make_reduction
from slurm_pt.parallel.gradient_norm import clip_factor
from slurm_pt.parallel.gradients import Gradients
from slurm_pt.parallel.pipeline import Message, run_pipeline
from slurm_pt.parallel.stored import Stored
from slurm_pt.training.engine import Evaluation, Totals, Update, diverged, sum_over_all
from slurm_pt.training.evaluation import evaluate
from slurm_pt.training.feed import Feed
from slurm_pt.training.local_updates import LocalUpdates
from slurm_pt.training.loss_scale import LossScale
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.optimizer import NamedAdamW
from slurm_pt.training.rank_model import RankModel
from slurm_pt.training.stored_state import StoredState, base_tensors, stored_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.config.schema import TrainConfig
    from slurm_pt.training.data import TokenDataset


class TrainStep:
    """Our own engine: the parts of one step of a model, with its optimizer.

    Args:
        phase: Told what a step is at.
    """

    def __init__(
        self,
        model: RankModel,
        config: TrainConfig,
        dataset: TokenDataset,
        *,
        phase: Callable[[str], None] = lambda _: None,
    ):
        groups, parameters = model.groups, model.trained_parameters()
        self.model, self.config, self.groups, self.phase = model, config, groups, phase
        self.optimizer = NamedAdamW(parameters, config, owned=model.owned)
        self.loss_scale = LossScale.of(config)
        self.local = LocalUpdates.of(config, parameters, group=groups.dp)
        self.num_microbatches = num_microbatches(config, groups.layout.dp)
        self.feed = Feed(dataset, config, groups, num_microbatches=self.num_microbatches)
        reduction = make_reduction(
            model.parallel, parameters.values(), group=groups.dp, sharding=model.sharding
        )
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
        (loss_sum, *sums), (stops, saves, blanks) = sum_over_all(
            [loss, *squares], stop=stop, save=save, blank=blank, groups=self.groups
        )
        factor = self.loss_scale.factor
        return Totals(
            loss=loss_sum,
            stop=stops,
            save=saves,
            blank=blanks,
            grad_norm=math.sqrt(sum(sums) / len(sums)) / factor,
            replica_norm=math.sqrt(sums[self.groups.place.dp_rank % len(sums)]) / factor,
        )

    def evaluate(self, stop_requested: Callable[[], bool]) -> Evaluation:
        """The mean loss of the held-out batches, without dropout."""
        self.model.train(False)
        evaluation = evaluate(
            self.model.chunks,
            self.feed,
            batches=self.config.eval_batches,
            message=self.message,
            groups=self.groups,
            stop_requested=stop_requested,
        )
        self.model.train(True)
        return evaluation

    def update(self, totals: Totals, lr: float) -> Update:
        """Skipped if a float16 gradient overflowed on any rank.

        Raises DivergedError for a norm that is not finite in other formats, before the weights
        are touched.
        """
        if totals.grad_norm is None or totals.replica_norm is None:
            raise ValueError("the norm of the gradients is part of this engine's reduction")
        overflow = not math.isfinite(totals.grad_norm)
        if overflow and not self.loss_scale.is_dynamic:
            raise diverged(totals.grad_norm)
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
        return Update(grad_norm=totals.grad_norm, skipped=overflow)

    def synchronise(self, step: int) -> None:
        """After the update that follows `step` completed ones: replicas agree, where it is time."""
        if self.local is not None:
            self.phase("synchronise")
            self.local.synchronise_if_due(step)

    @property
    def updates(self) -> int:
        """How often the weights were changed."""
        return self.optimizer.updates

    def stored(self) -> StoredState:
        """Everything to be saved."""
        return stored_state(
            self.model, self.optimizer, reduction=self.held.buckets.reduction, local=self.local
        )

    def base(self) -> Stored:
        """The weights to be loaded from another run's checkpoint."""
        return base_tensors(self.model)

    def begin(self) -> None:
        """Take over the weights as they are now, before the first step of a run."""
        if self.local is not None:
            self.local.agree()

    def loaded(self, updates: int) -> None:
        """Take over what was loaded into `stored`, after so many updates."""
        self.optimizer.set_step(updates)
