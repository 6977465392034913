"""DeepSpeed's ZeRO 1, 2 and 3 over our model, with our data, learning rate and checkpoints.

DeepSpeed runs the backward pass, reduces and clips the gradients and updates the weights. What
the layers compute over the tensor group stays ours.

Source: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

import contextlib
import io
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurm_pt.config.batch_rules import num_microbatches
from slurm_pt.parallel.groups import ProcessGroups, all_reduce
from slurm_pt.parallel.pipeline import Message
from slurm_pt.training.deepspeed_start import (
    PERSISTENT_NUMBERS,
    Units,
    adamw,
    load_deepspeed,
    partitioned_from_the_start,
    settings,
)
from slurm_pt.training.engine import Evaluation, Totals, Update, diverged, sum_over_all
from slurm_pt.training.evaluation import evaluate
from slurm_pt.training.feed import Feed
from slurm_pt.training.loss_scale import LossScale
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.rank_model import RankModel
from slurm_pt.training.stored_state import StoredState
from slurm_pt.training.zero_state import ZeroState

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.config.schema import ModelConfig, ParallelConfig, TrainConfig
    from slurm_pt.parallel.stored import Stored
    from slurm_pt.training.data import TokenDataset


class DeepSpeedEngine:
    """A `StepEngine`. Making one is a collective over all ranks."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        parallel: ParallelConfig,
        train: TrainConfig,
        dataset: TokenDataset,
        groups: ProcessGroups,
        phase: Callable[[str], None],
        persistent_numbers: int = PERSISTENT_NUMBERS,
    ):
        self.config, self.groups, self.phase = train, groups, phase
        self.loss_scale = LossScale()
        self.num_microbatches = num_microbatches(train, groups.layout.dp)
        self.feed = Feed(dataset, train, groups, num_microbatches=self.num_microbatches)
        deepspeed = load_deepspeed(groups)
        config = settings(
            parallel,
            train,
            num_microbatches=self.num_microbatches,
            on_cuda=groups.device.type == "cuda",
            persistent_numbers=persistent_numbers,
        )
        with partitioned_from_the_start(deepspeed, config, groups):
            self.model = RankModel(model, parallel=parallel, train=train, groups=groups)
        (chunk,) = self.model.chunks
        _mark_split_parameters(self.model)
        _sum_partial_gradients(self.model, groups)
        self.engine: Any
        with contextlib.redirect_stdout(io.StringIO()):  # one of its optimizers prints
            self.engine, *_ = deepspeed.initialize(
                model=chunk, optimizer=adamw(chunk, train), config=config, mpu=Units(groups)
            )
        self.state = ZeroState(self.engine.optimizer, self.model, groups)
        self.state.initialise(chunk.initial_value)
        shape = self.model.message_shape(
            micro_batch_size=train.micro_batch_size, seq_len=train.seq_len
        )
        self.message = Message(shape=shape, dtype=self.model.dtype)

    @property
    def updates(self) -> int:
        """How often the weights were changed."""
        return self.state.updates

    def gradients(self, step: int, micro_batches: list[MicroBatch]) -> Tensor:  # noqa: ARG002
        """This rank's part of the mean loss. Gradients are reduced as DeepSpeed sees fit."""
        self.phase("forward_backward")
        loss = torch.zeros((), dtype=torch.float64, device=self.groups.device)
        for number, micro_batch in enumerate(micro_batches, start=1):
            output = self.engine(None, micro_batch)
            loss += output.detach() / len(micro_batches)
            self.engine.backward(output)
            if number < len(micro_batches):
                self.engine.step()  # counts the micro-batch; the weights change after the last
        if self.groups.place.tp_rank != 0:  # each tp rank has the whole loss: count it once
            loss.zero_()
        return loss / self.groups.layout.dp

    def reduce(
        self,
        step: int,  # noqa: ARG002
        loss: Tensor,
        *,
        stop: bool,
        save: bool,
        blank: bool,
    ) -> Totals:
        """The collective that all ranks agree in; DeepSpeed sums the norm in the update."""
        (loss_sum,), (stops, saves, blanks) = sum_over_all(
            [loss], stop=stop, save=save, blank=blank, groups=self.groups
        )
        return Totals(loss=loss_sum, stop=stops, save=saves, blank=blanks)

    def update(self, totals: Totals, lr: float) -> Update:  # noqa: ARG002 (other engines need it)
        """Raises DivergedError for a norm that is not finite: DeepSpeed then changes nothing."""
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        grad_norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(grad_norm):
            raise diverged(grad_norm)
        return Update(grad_norm=grad_norm)

    def evaluate(self, stop_requested: Callable[[], bool]) -> Evaluation:
        """The mean loss of the held-out batches, without dropout."""
        self.engine.eval()
        evaluation = evaluate(
            [self.engine],
            self.feed,
            batches=self.config.eval_batches,
            message=self.message,
            groups=self.groups,
            stop_requested=stop_requested,
        )
        self.engine.train()
        return evaluation

    def synchronise(self, step: int) -> None:
        """Replicas have the same weights after every update."""

    def stored(self) -> StoredState:
        """The rank's flat parts of float32 weights and moments, by stored name."""
        tensors, fragments = self.state.stored()
        return StoredState(tensors, dict(fragments), own={})

    def base(self) -> Stored:
        """The rank's flat parts of the weights."""
        tensors, shards, _ = self.stored()
        names = [name for name in tensors if name.startswith("model/")]
        return {name: tensors[name] for name in names}, {name: shards[name] for name in names}

    def begin(self) -> None:
        """Take over the weights as they are now, before the first step of a run."""
        self.state.loaded(0)

    def loaded(self, updates: int) -> None:
        """Take over what was loaded into `stored`, after so many updates."""
        self.state.loaded(updates)


def _mark_split_parameters(model: RankModel) -> None:
    """Tell DeepSpeed which parameters each tensor rank has a part of its own of.

    Of the others it counts the first tensor rank's gradient alone. Without the mark the norm is
    too small, and nothing says so.
    """
    parameters = dict(model.named_parameters())
    for piece in model.pieces():
        mark: Any = parameters[piece.parameter]
        mark.tensor_model_parallel = piece.shard.split


def _sum_partial_gradients(model: RankModel, groups: ProcessGroups) -> None:
    """Sum gradients that each tensor rank knows for its part of the sequence alone.

    In every backward pass, since DeepSpeed takes them over at its end.
    """
    for parameter in model.partial_gradients():
        parameter.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: all_reduce(gradient.clone(), groups.tp)
        )
