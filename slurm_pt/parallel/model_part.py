"""What one rank holds of a model, as gradients and checkpoints see it: ours and a user's alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from slurm_pt.parallel.axis import StoredPart
from slurm_pt.parallel.shard import WHOLE, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator


class Piece(NamedTuple):
    """A part of a parameter that is stored, and initialised, as a tensor of its own."""

    parameter: str
    rows: slice
    """Of the parameter, along dim 0."""
    stored: str
    """The name in checkpoints, the same in every layout."""
    shard: Shard

    def of(self, tensor: Tensor) -> Tensor:
        """The piece's view of the parameter, or of a tensor of its shape (gradient, moment)."""
        return tensor if self.rows == slice(None) else tensor[self.rows]


class ModelPart(Protocol):
    """The parameters of a rank and how they lie in the whole model."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def pieces(self) -> list[Piece]:
        """All parameters, cut into what is stored under names of its own."""
        ...

    def partial_gradients(self) -> list[nn.Parameter]:
        """The parameters whose gradient is to be summed over the tensor group, once a step."""
        ...

    def shared_gradients(self) -> list[Tensor]:
        """The gradients to be summed over `ProcessGroups.kv`, once a step."""
        ...

    def tied_copies(self) -> frozenset[str]:
        """The parameters that are copies of one on another rank."""
        ...

    def tied_parameter(self) -> nn.Parameter | None:
        """This rank's copy of what the first and the last stage hold both; None if none does."""
        ...


@runtime_checkable
class SplitLayer(Protocol):
    """A module that knows where its local parameters lie in the whole ones."""

    def stored_parts(self, parameter: str) -> list[StoredPart]: ...


def pieces_of(root: nn.Module) -> Iterator[Piece]:
    """The pieces of all parameters of a module; one that has several names comes once."""
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            for part in _stored_parts(module, name):
                stored = _join(prefix, part.name)
                yield Piece(_join(prefix, name), part.rows, stored, part.shard)


def shared_gradients(model: ModelPart, *, tp: int) -> list[Tensor]:
    """The gradients of pieces that several tensor ranks hold without all of them doing so."""
    parameters = dict(model.named_parameters())
    shared = []
    for piece in model.pieces():
        gradient = parameters[piece.parameter].grad
        if piece.shard != WHOLE and piece.shard.parts < tp and gradient is not None:
            shared.append(piece.of(gradient))
    return shared


def _stored_parts(module: nn.Module, parameter: str) -> Iterator[StoredPart]:
    if isinstance(module, SplitLayer):
        yield from module.stored_parts(parameter)
    else:
        yield StoredPart(parameter, slice(None), WHOLE)


def _join(prefix: str, name: str) -> str:
    """A name relative to a module, from the root; "../" leads to the module's parent."""
    while name.startswith("../"):
        prefix, name = prefix.rpartition(".")[0], name.removeprefix("../")
    return f"{prefix}.{name}" if prefix else name
