"""A user's own module, split over tensor x pipeline x data parallel ranks by a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from slurm_pt.config.choices import GradientCompression, Schedule
from slurm_pt.config.schema import ParallelConfig
from slurm_pt.errors import ConfigError, Problem
from slurm_pt.parallel import model_part
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.gradients import Gradients
from slurm_pt.parallel.groups import ProcessGroups, all_reduce
from slurm_pt.parallel.model_part import Piece, pieces_of
from slurm_pt.parallel.model_state import ModelState
from slurm_pt.parallel.pipeline import Message, run_forward_pipeline, run_pipeline
from slurm_pt.parallel.replicas import equalise
from slurm_pt.parallel.shard import WHOLE
from slurm_pt.parallel.split_layers import (
    give_memory,
    replace_layers,
    role_problems,
    sequence_problems,
)
from slurm_pt.parallel.split_plan import SplitPlan, inside
from slurm_pt.parallel.split_units import (
    Ties,
    UnitCall,
    UnitChunk,
    border_message,
    call_unit,
    keep_units,
    stage_units,
)
from slurm_pt.parallel.weight_gradients import WeightGradients

BatchT = TypeVar("BatchT")


def split(
    model: nn.Module,
    plan: SplitPlan,
    groups: ProcessGroups,
    *,
    inputs: Callable[[BatchT], Any],
    loss: Callable[[Any, BatchT], Tensor],
    message_shape: Sequence[int] | None = None,
    message_dtype: torch.dtype | None = None,
    call: UnitCall[BatchT] = call_unit,
    parallel: ParallelConfig | None = None,
) -> SplitModel[BatchT]:
    """This rank's part of a model. Collective over all ranks.

    The model's tree is changed in place: layers that the plan splits hold their slice, and units
    of other stages are gone. It is moved to the rank's device; replicas get the first one's
    weights. With a model on the meta device no rank needs memory for the whole: call `materialise`
    before it is used.

    Args:
        model: whole, with the same structure on all ranks.
        plan: what may be split.
        groups: `Run.groups`.
        inputs: what the first unit is called with, from a micro-batch.
        loss: the mean loss of a micro-batch, from what the last unit gave; a scalar. Of logits
            that are split by columns take it with `cross_entropy`.
        message_shape: of what one unit gives to the next for one micro-batch, the sequence whole;
            needed for stages.
        message_dtype: its format; None: that of the weights.
        call: how a unit is called; by default with the output of the one before alone.
        parallel: `Run.config.parallel`: whether the sequence is split, the schedule, virtual
            stages, and as `stage_layers` the units of each stage (default: by parameters).

    Raises:
        ConfigError: the plan does not fit the model or the layout.
    """
    parallel = parallel or ParallelConfig()
    problems = list(trainer_only_problems(parallel))
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    roles = plan.assign([*names, *parameters], problems)
    units = plan.expand_units(names, problems)
    problems += role_problems(model, roles, groups.layout, kv_sharing=groups.kv.size())
    axis = _axis(groups, parallel)
    stages = stage_units(model, units, groups.layout.pp, parallel, problems)
    ties = Ties.between(model, stages, groups.layout.pp, problems)
    if axis.splits_sequence:
        problems += sequence_problems(model, roles)
    dtype = message_dtype or next(model.parameters()).dtype
    message = border_message(message_shape, dtype, plan, axis, len(stages), problems)
    if problems:
        raise ConfigError(problems)
    mine = range(groups.place.pp_rank, len(stages), groups.layout.pp)
    keep_units(model, units, [unit for stage in mine for unit in stages[stage]])
    replace_layers(model, roles, axis, sequence_dim=plan.sequence_dim)
    chunks = [
        UnitChunk(
            [(name, model.get_submodule(name)) for name in stages[stage]],
            inputs=inputs if stage == 0 else None,
            loss=loss if stage == len(stages) - 1 else None,
            call=call,
            message=message,
        )
        for stage in mine
    ]
    whole = {name for name, role in roles.items() if role in ("scatter", "gather")}
    return SplitModel(model, chunks, groups, axis, parallel.schedule, message, ties, whole)


def trainer_only_problems(parallel: ParallelConfig) -> Iterator[Problem]:
    """What our own trainer alone does."""
    compression = parallel.gradient_compression
    for key, value, plain in (
        ("parallel.zero", parallel.zero, 0),
        ("parallel.gradient_compression", compression.value, GradientCompression.none.value),
    ):
        if value != plain:
            rule = "gradients of a split model are summed plainly, and its optimizer is yours"
            yield Problem(key, value, rule, f"set {key}={plain}")


class SplitModel(Generic[BatchT]):
    """What a rank holds of a split model; made by `split`. A `ModelPart`."""

    def __init__(
        self,
        module: nn.Module,
        chunks: Sequence[UnitChunk[BatchT]],
        groups: ProcessGroups,
        axis: TensorAxis,
        schedule: Schedule,
        message: Message | None,
        ties: Ties,
        on_whole_sequence: set[str],
    ):
        self.module, self.chunks, self.groups, self.axis = module, chunks, groups, axis
        self.schedule, self.message = schedule, message
        self._ties, self._on_whole_sequence = ties, on_whole_sequence
        self._gradients: Gradients | None = None
        if not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
            self._start()

    # ------------------------------------------------------------------------------- training

    def forward_backward(self, micro_batches: Sequence[BatchT]) -> float:
        """The mean loss over the micro-batches of all dp ranks, and its gradients in `.grad`.

        Gradients of earlier calls are zeroed. Collective; every dp rank gives as many.
        """
        self.gradients.start_step(len(micro_batches))
        loss = run_pipeline(
            self.chunks,
            micro_batches,
            message=self.message or Message((), torch.float32),
            groups=self.groups,
            schedule=self.schedule,
            weight_gradients=self.axis.weight_gradients,
            loss_scale=1.0 / self.groups.layout.dp,
        )
        self.gradients.finish()
        return self._mean(loss)

    def forward(self, micro_batches: Sequence[BatchT]) -> float:
        """The mean loss over the micro-batches of all dp ranks. Collective, without gradients."""
        loss = run_forward_pipeline(
            self.chunks,
            micro_batches,
            message=self.message or Message((), torch.float32),
            groups=self.groups,
        )
        return self._mean(loss)

    def clip_gradients(self, max_norm: float | None) -> float:
        """The norm of the whole model's gradient, before it was brought down to `max_norm`.

        Collective. None: it is measured only.
        """
        return self.gradients.clip(max_norm)

    @property
    def gradients(self) -> Gradients:
        if self._gradients is None:
            raise ValueError("the model is on the meta device: call materialise() first")
        return self._gradients

    def train(self, training: bool = True) -> None:
        self.module.train(training)

    # -------------------------------------------------------------------------------- weights

    @torch.no_grad()
    def materialise(self, init: Callable[[str, Tensor], Any] | None = None) -> None:
        """Give a model on the meta device its memory, and its first values. Collective.

        `init` fills one whole tensor at a time, on the CPU, by its stored name: it must give the
        same on all ranks, so seed it from the name. It is asked for buffers too. None: the weights
        are loaded afterwards.

        Raises ValueError for buffers without values where there is no `init`.
        """
        empty = {name for name, parameter in self.named_parameters() if parameter.is_meta}
        buffers = [name for name, buffer in self.module.named_buffers() if buffer.is_meta]
        if buffers and init is None:
            raise ValueError(
                f"the buffer {buffers[0]} is on the meta device and is not loaded: give "
                "materialise() an init that fills it, or build it on the CPU"
            )
        give_memory(self.module, self.groups.device)
        parameters = dict(self.named_parameters())
        if init is not None:
            for piece in self.pieces():
                if piece.parameter in empty:
                    local = piece.of(parameters[piece.parameter])
                    whole = torch.empty(piece.shard.whole_shape(local.shape), dtype=local.dtype)
                    init(piece.stored, whole)
                    local.copy_(whole[piece.shard.slices(local.shape)])
            held = dict(self.module.named_buffers())
            for name in buffers:
                init(name, held[name])
        self._start()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.module.parameters()

    def pieces(self) -> list[Piece]:
        copies = self.tied_copies()
        return [
            piece._replace(stored=str(self._ties.stored)) if piece.parameter in copies else piece
            for piece in pieces_of(self.module)
        ]

    def partial_gradients(self) -> list[nn.Parameter]:
        """Of what runs on a part of the sequence, each tensor rank knows that part's alone."""
        if not self.axis.splits_sequence:
            return []
        whole = {piece.parameter for piece in self.pieces() if piece.shard == WHOLE}
        return [
            parameter
            for name, parameter in self.named_parameters()
            if name in whole and not any(inside(name, region) for region in self._on_whole_sequence)
        ]

    def shared_gradients(self) -> list[Tensor]:
        return model_part.shared_gradients(self, tp=self.axis.tp)

    def tied_copies(self) -> frozenset[str]:
        held = dict(self.named_parameters())
        here = self._ties.stored in held
        return frozenset() if here else frozenset(held) & self._ties.copies

    def tied_parameter(self) -> nn.Parameter | None:
        held = dict(self.named_parameters())
        names = [self._ties.stored, *sorted(self._ties.copies)]
        return next((held[name] for name in names if name is not None and name in held), None)

    def state(self, optimizer: torch.optim.Optimizer | None = None) -> ModelState:
        """For `Run.save` and `Run.resume`: weights, buffers, and what the optimizer holds."""
        saved = self.module.state_dict()
        buffers = {name: b for name, b in self.module.named_buffers() if name in saved}
        return ModelState(self, optimizer, buffers)

    # ------------------------------------------------------------------------------- plumbing

    def _start(self) -> None:
        self.module.to(self.groups.device)
        equalise(self, self.module.buffers(), self.groups)
        self._gradients = Gradients(self, self.groups)

    def _mean(self, loss: Tensor) -> float:
        if self.groups.place.tp_rank != 0:  # each tensor rank has the whole loss: count it once
            loss.zero_()
        return all_reduce(loss, self.groups.world).item() / self.groups.layout.dp


def _axis(groups: ProcessGroups, parallel: ParallelConfig) -> TensorAxis:
    later = WeightGradients() if parallel.schedule is Schedule.zero_bubble else None
    return TensorAxis.of(groups, sequence=parallel.sequence, weight_gradients=later)
