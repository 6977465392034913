"""Weights and moments under DeepSpeed's ZeRO, as flat parts of our named tensors.

ZeRO gives each data-parallel rank a range of the flat parameters: stages 1 and 2 of all parameters
of a group in a row, stage 3 of each parameter. The rank keeps float32 weights and moments of its
range alone. Here that becomes, for each of our stored names, the range of it that this rank holds:
enough to save and load it in place, with nothing gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurm_pt.parallel.model_part import Piece
from slurm_pt.parallel.shard import Fragment

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.training.rank_model import RankModel

FLAT_WEIGHTS = (
    "fp32_partitioned_groups_flat",  # stage 3
    "single_partition_of_fp32_groups",  # stages 1 and 2
    "fp32_groups_flat_partition",  # stage 1 in bfloat16 has an optimizer of its own
)
"""Where DeepSpeed's optimizers have the float32 weights of this rank."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Held:
    """What this rank holds of one parameter."""

    shape: torch.Size
    """Of the parameter, whole on a tensor rank."""
    begin: int
    """Numbers of the flat parameter before the range."""
    tensors: dict[str, Tensor]
    """float32 [range], by kind: views of what DeepSpeed holds."""


class ZeroState:
    """The state of a DeepSpeed optimizer; its moments exist from the start."""

    def __init__(self, optimizer: Any, model: RankModel, groups: ProcessGroups):
        self.optimizer, self.model = optimizer, model
        self.stage_3 = hasattr(optimizer, FLAT_WEIGHTS[0])
        found = next(name for name in FLAT_WEIGHTS if hasattr(optimizer, name))
        self.flat: list[Tensor] = getattr(optimizer, found)
        self.moments: list[dict[str, Tensor]] = [self._start(flat) for flat in self.flat]
        hold = self._held_by_stage_3 if self.stage_3 else self._held_by_stages_1_and_2
        self.held = {
            name: hold(parameter, groups.place.dp_rank)
            for name, parameter in model.named_parameters()
        }

    @property
    def updates(self) -> int:
        """How often the weights were changed."""
        return int(self.moments[0]["step"])

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Fragment]]:
        """This rank's range of every stored tensor, empty where it holds nothing of it."""
        tensors: dict[str, Tensor] = {}
        fragments: dict[str, Fragment] = {}
        for piece in self.model.pieces():
            held = self.held[piece.parameter]
            rows = range(held.shape[0])[piece.rows]
            local = (len(rows), *held.shape[1:])
            row_numbers = math.prod(held.shape[1:])
            # The piece's range and ours, both counted in the flat parameter.
            first, end = rows.start * row_numbers, rows.stop * row_numbers
            for kind, values in held.tensors.items():
                low = min(max(held.begin, first), end)
                high = max(min(held.begin + values.numel(), end), low)
                name = f"{kind}/{piece.stored}"
                tensors[name] = values[low - held.begin : high - held.begin]
                numbers = range(low - first, high - first)
                fragments[name] = Fragment.of(piece.shard, local, numbers)
        return tensors, fragments

    @torch.no_grad()
    def initialise(self, initial_value: Callable[[Piece, torch.Size], Tensor]) -> None:
        """Set the initial weights, of one stored tensor at a time."""
        tensors, fragments = self.stored()
        for piece in self.model.pieces():
            name = f"model/{piece.stored}"
            held = fragments[name]
            if held.numbers:
                value = initial_value(piece, torch.Size(held.shape)).reshape(-1)
                tensors[name].copy_(value[held.numbers.start : held.numbers.stop])
        self._show_weights()

    def loaded(self, updates: int) -> None:
        """Take over what was loaded into `stored`, after so many updates."""
        for moments in self.moments:
            moments["step"].fill_(float(updates))
        self._show_weights()

    def _start(self, flat: Tensor) -> dict[str, Tensor]:
        """Torch's AdamW makes its state in the first update; a resumed one comes before that."""
        state: dict[str, Tensor] = self.optimizer.optimizer.state[flat]
        state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(flat, requires_grad=False)
        return state

    def _held_by_stages_1_and_2(self, parameter: Any, _: int) -> _Held:
        mapping = parameter._hp_mapping
        if mapping is None:  # other ranks hold all of it
            return self._view(parameter.shape, begin=0, group=0, at=0, count=0)
        return self._view(
            parameter.shape,
            begin=mapping.lp_fragment_address.start,
            group=mapping.param_group_index,
            at=mapping.hp_fragment_address.start,
            count=mapping.hp_fragment_address.numel,
        )

    def _held_by_stage_3(self, parameter: Any, dp_rank: int) -> _Held:
        group, at, numbers = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        begin = min(dp_rank * parameter.ds_tensor.ds_numel, parameter.ds_numel)
        # The last ranks' parts end with padding.
        count = min(int(numbers), parameter.ds_numel - begin)
        return self._view(parameter.ds_shape, begin=begin, group=group, at=int(at), count=count)

    def _view(self, shape: torch.Size, *, begin: int, group: int, at: int, count: int) -> _Held:
        weights, moments = self.flat[group].detach(), self.moments[group]
        tensors = {"model": weights[at : at + count]}
        for moment in MOMENTS:
            tensors[f"optimizer/{moment}"] = moments[moment][at : at + count]
        return _Held(torch.Size(shape), begin, tensors)

    def _show_weights(self) -> None:
        """Give the model the float32 weights as they are now."""
        optimizer = self.optimizer
        if not self.stage_3:
            optimizer.update_lp_params()
            return
        optimizer._partition_all_parameters()
        for group in range(len(self.flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
