"""A model part and its optimizer as a checkpoint takes them: each rank its parts, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.model_part import ModelPart
from slurm_pt.parallel.shard import WHOLE, Shard
from slurm_pt.parallel.stored import stored_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping


class ModelState:
    """For `Run.save` and `Run.resume`: a value that loads into any layout.

    The optimizer is any of torch's whose state is tensors: of a parameter's shape, which are split
    as it is, or single numbers.
    """

    def __init__(
        self,
        model: ModelPart,
        optimizer: torch.optim.Optimizer | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ):
        self.model, self.optimizer, self.buffers = model, optimizer, dict(buffers or {})

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """All tensors by their stored names, and which part of the whole each is.

        Raises CheckpointError for an optimizer's state that is no tensor of such a shape.
        """
        moments: dict[str, dict[str, Tensor]] = {}
        numbers: dict[str, dict[str, Tensor]] = {}
        for name, parameter, kind, value in self._optimizer_state():
            if value.shape == parameter.shape:
                moments.setdefault(kind, {})[name] = value
            elif value.ndim == 0:
                numbers.setdefault(kind, {})[name] = value
            else:
                raise CheckpointError(
                    f"the optimizer's {kind} of {name} has the shape {tuple(value.shape)}: it is "
                    "not split as the parameter is. Use one whose state has the parameters' shapes"
                )
        tensors, shards = stored_tensors(self.model, moments)
        for piece in self.model.pieces():
            for kind, by_parameter in numbers.items():
                if piece.parameter in by_parameter:
                    tensors[f"optimizer/{kind}/{piece.stored}"] = by_parameter[piece.parameter]
        for name, buffer in self.buffers.items():
            tensors[f"buffers/{name}"], shards[f"buffers/{name}"] = buffer, WHOLE
        return tensors, shards

    def prepare(self) -> None:
        """Make the optimizer's state exist, to be loaded into: by a step that changes nothing.

        Gradients are zero after it.
        """
        if self.optimizer is None or self._optimizer_state():
            return
        for _, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
            elif parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def settings(self) -> list[dict[str, Any]]:
        """The optimizer's settings (learning rate, ...), group by group; the same on all ranks."""
        if self.optimizer is None:
            return []
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def load_settings(self, settings: list[dict[str, Any]]) -> None:
        if self.optimizer is not None:
            for group, values in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(values)

    def _optimizer_state(self) -> list[tuple[str, Tensor, str, Tensor]]:
        """Parameter name, parameter, kind and value of all that the optimizer holds."""
        if self.optimizer is None:
            return []
        held: list[tuple[str, Tensor, str, Any]] = [
            (name, parameter, kind, value)
            for name, parameter in self.model.named_parameters()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if value is not None
        ]
        for name, _, kind, value in held:
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the optimizer's {kind} of {name} is a {type(value).__name__}, no tensor: it "
                    "would be lost. Use an optimizer whose state is tensors, as torch's are"
                )
        return held
