"""The parts of one optimizer step on this rank, and of an evaluation.

A step makes one collective over all ranks: a few float64 numbers that carry the gradient norm, the
loss, and whether anyone asked to stop or to save.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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
from slurm_pt.parallel.groups import ProcessGroups
from slurm_pt.parallel.pipeline import Message, run_pipeline
from slurm_pt.training.engine import Evaluation, Totals, Update, diverged, sum_over_all
from slurm_pt.training.evaluation import evaluate
from slurm_pt.training.feed import Feed
from slurm_pt.training.loss_scale import LossScale
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.optimizer import NamedAdamW
from slurm_pt.training.rank_model import RankModel, stored_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.config.schema import TrainConfig
    from slurm_pt.parallel.shard import Shard
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


class TrainStep:
    """Our own engine: the parts of one step."""

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
        self.buckets = GradientBuckets(model.parameters(), group=groups.dp)
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
        (loss_sum, square_sum), (stops, saves, blanks) = sum_over_all(
            [loss, square], stop=stop, save=save, blank=blank, groups=self.groups
        )
        grad_norm = math.sqrt(square_sum) / self.loss_scale.factor
        return Totals(loss=loss_sum, stop=stops, save=saves, blank=blanks, grad_norm=grad_norm)

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
        grad_norm = totals.grad_norm
        if grad_norm is None:
            raise ValueError("the norm of the gradients is part of this engine's reduction")
        overflow = not math.isfinite(grad_norm)
        if overflow and not self.loss_scale.is_dynamic:
            raise diverged(grad_norm)
        if not overflow:
            factor = clip_factor(grad_norm, self.config.grad_clip) / self.loss_scale.factor
            if factor != 1.0:
                self.buckets.scale(factor)
            self.optimizer.step(lr)
        self.loss_scale.note(overflow=overflow)
        return Update(grad_norm=grad_norm, skipped=overflow)

    @property
    def updates(self) -> int:
        """How often the weights were changed."""
        return self.optimizer.updates

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """Weights and moments by stored name, and which part of the whole each is."""
        return stored_tensors(self.model, self.optimizer)

    def loaded(self, updates: int) -> None:
        """Take over what was loaded into `stored`, after so many updates."""
        self.optimizer.set_step(updates)


def _counted_gradients(
    model: RankModel, groups: ProcessGroups
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that this rank counts in the norm, and those a tensor rank counts for it.

    Views into the buckets. A tied copy counts nowhere: the embedding on the first stage has the
    same gradient.
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
            counted.append(piece.of(gradient))
        elif groups.place.dp_rank == 0:
            copies.append(piece.of(gradient))
    return counted, copies
