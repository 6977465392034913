"""The units of a user's model as pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from slurm_pt.config.schema import ParallelConfig
from slurm_pt.errors import Problem
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.pipeline import Message
from slurm_pt.parallel.split_plan import SplitPlan, inside
from slurm_pt.plan.layout import split_by_cost, split_layers

BatchT = TypeVar("BatchT")
UnitCall = Callable[[nn.Module, Any, BatchT], Any]
"""Calls a unit with what the one before gave (or `inputs` made) and the micro-batch."""


def call_unit(unit: nn.Module, entered: Any, _micro_batch: Any) -> Any:
    """What a unit gives that takes nothing but the output of the one before."""
    return unit(entered)


class UnitChunk(Generic[BatchT]):
    """One stage: a `pipeline.Chunk` made of units."""

    def __init__(
        self,
        units: Sequence[tuple[str, nn.Module]],
        *,
        inputs: Callable[[BatchT], Any] | None,
        loss: Callable[[Any, BatchT], Tensor] | None,
        call: UnitCall[BatchT],
        message: Message | None,
    ):
        self.units, self.inputs, self.loss = units, inputs, loss
        self.call, self.message = call, message

    def __call__(self, entered: Tensor | None, micro_batch: BatchT) -> Tensor:
        value: Any = entered if self.inputs is None else self.inputs(micro_batch)
        for _, unit in self.units:
            value = self.call(unit, value, micro_batch)
        if self.loss is not None:
            return self.loss(value, micro_batch)
        self._check(value)
        output: Tensor = value
        return output

    def _check(self, value: Any) -> None:
        """The next stage waits for bytes of one shape: others would hang it, or be misread."""
        message = self.message
        if message is None:
            raise ValueError("a stage that is not the last needs its message")
        if not isinstance(value, Tensor):
            found: Any = f"a {type(value).__name__}"
        elif value.shape != message.shape or value.dtype != message.dtype:
            found = f"{value.dtype} {tuple(value.shape)}"
        else:
            return
        raise ValueError(
            f"unit {self.units[-1][0]!r} gave {found}, but the next stage waits for "
            f"{message.dtype} {message.shape}, a rank's part of message_shape. To fix: give "
            "split() the message_shape and message_dtype of one micro-batch, and micro-batches "
            "of one size"
        )


class OnAnotherStage(nn.Module):
    """Stands where a unit was that another rank holds."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("this unit is on another pipeline stage: run the model's units alone")


def stage_units(
    model: nn.Module,
    units: Sequence[str],
    pp: int,
    parallel: ParallelConfig,
    problems: list[Problem],
) -> list[list[str]]:
    """The units of each stage, by `parallel.stage_layers` or with even numbers of parameters.

    The cost of a unit is its parameters' number, but those of embeddings, where rows are looked up.
    Adds what is wrong to `problems`.
    """
    stages = pp * parallel.virtual_stages
    problems += _unit_problems(model, units)
    outside = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not any(inside(name, unit) for unit in units)
    ]
    if outside:
        fix = f"name the module that holds {outside[0]}, in its place"
        problems.append(Problem("units", list(units), f"{outside[0]} is in none of them", fix))
    if stages > len(units) or outside:
        if stages > len(units):
            rule = f"{stages} stages (parallel.pp={pp} * parallel.virtual_stages) need a unit each"
            fix = "name more units in the plan, or lower parallel.pp"
            problems.append(Problem("units", len(units), rule, fix))
        return [list(units)]
    sizes = parallel.stage_layers
    if sizes is None:
        spans = split_by_cost([_cost(model.get_submodule(unit)) for unit in units], stages)
    else:
        try:
            spans = split_layers(len(units), stages, sizes)
        except ValueError as error:
            fix = f"{stages} numbers of units, together {len(units)}, or null"
            problems.append(Problem("parallel.stage_layers", list(sizes), str(error), fix))
            return [list(units)]
    return [[units[index] for index in span] for span in spans]


def _unit_problems(model: nn.Module, units: Sequence[str]) -> Iterator[Problem]:
    """Units that cannot be called, or that share their weights with one before."""
    first: dict[int, str] = {}
    for name in units:
        unit = model.get_submodule(name)
        if type(unit).forward is nn.Module.forward:
            fix = f"name what is in it instead, such as '{name}.*'"
            yield Problem("units", name, f"a {type(unit).__name__} cannot be called", fix)
        same = first.setdefault(id(unit), name)
        if same != name and any(True for _ in unit.parameters()):
            fix = "make it one unit with all that is called between the two, or give it its own"
            yield Problem("units", name, f"is the same module as {same}, with its weights", fix)


def border_message(
    shape: Sequence[int] | None,
    dtype: torch.dtype,
    plan: SplitPlan,
    axis: TensorAxis,
    stages: int,
    problems: list[Problem],
) -> Message | None:
    """What crosses stages, of a rank's part of the sequence."""
    if shape is None:
        if stages > 1:
            fix = "give what crosses stages for one micro-batch, such as (batch, seq, width)"
            problems.append(Problem("message_shape", None, "stages have to know it", fix))
        return None
    local = list(shape)
    if axis.splits_sequence:
        seq_len = local[plan.sequence_dim]
        if seq_len % axis.tp:
            rule = f"parallel.sequence=true splits its dim {plan.sequence_dim} over tp={axis.tp}"
            fix = f"make the sequence a multiple of {axis.tp}, or set parallel.sequence=false"
            problems.append(Problem("message_shape", list(shape), rule, fix))
        local[plan.sequence_dim] = seq_len // axis.tp
    return Message(tuple(local), dtype)


def keep_units(model: nn.Module, units: Sequence[str], mine: Sequence[str]) -> None:
    """Take all other units out of the model's tree."""
    for name in set(units) - set(mine):
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent).add_module(last, OnAnotherStage())


@dataclass(frozen=True)
class Ties:
    """The parameter that the first and the last pipeline rank hold both."""

    stored: str | None = None
    """Its first name in the model, by which it is stored."""
    copies: frozenset[str] = field(default_factory=frozenset)
    """Its other names."""

    @classmethod
    def between(
        cls, model: nn.Module, stages: Sequence[Sequence[str]], pp: int, problems: list[Problem]
    ) -> Ties:
        """The tie of a model, before units are taken out of it."""
        holders: dict[int, dict[str, int]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), {})[name] = _rank_of(name, stages, pp)
        found = [names for names in holders.values() if len(set(names.values())) > 1]
        for names in found:
            ends = {*names.values()} == {0, pp - 1}
            if not ends or len(found) > 1:
                rule = "one parameter can be shared, between the first and the last stage"
                fix = "untie it, or put both modules on one stage with parallel.stage_layers"
                problems.append(Problem(" = ".join(names), "tied", rule, fix))
        if not found:
            return cls()
        stored, *copies = found[0]
        return cls(stored, frozenset(copies))


def _rank_of(name: str, stages: Sequence[Sequence[str]], pp: int) -> int:
    for stage, units in enumerate(stages):
        if any(inside(name, unit) for unit in units):
            return stage % pp
    return 0


def _cost(unit: nn.Module) -> float:
    looked_up = {
        id(parameter)
        for module in unit.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    return float(sum(p.numel() for p in unit.parameters() if id(p) not in looked_up))
