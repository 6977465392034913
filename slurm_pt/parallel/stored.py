"""What a rank saves of a model part, by stored name: the same names in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from slurm_pt.parallel.model_part import ModelPart, Piece
from slurm_pt.parallel.shard import Fragment, Shard

if TYPE_CHECKING:
    from slurm_pt.parallel.zero import ShardedParameters

Stored = tuple[dict[str, Tensor], dict[str, Shard]]
"""The tensors themselves, to save or to load into, and which part of the whole each is."""
Held = Mapping[str, Mapping[str, Tensor]]
"""Tensors by kind and parameter."""


def stored_tensors(
    model: ModelPart,
    moments: Held,
    *,
    weights: Mapping[str, Tensor] | None = None,
    sharding: ShardedParameters | None = None,
) -> Stored:
    """The weights of a rank (default: all that it has), and its optimizer's moments.

    With ZeRO the moments are those of what this replica owns of each parameter, flat.
    """
    named_weights = dict(model.named_parameters()) if weights is None else weights
    detached = {name: weight.detach() for name, weight in named_weights.items()}
    named = {f"optimizer/{kind}": by_parameter for kind, by_parameter in moments.items()}
    tensors, shards = stored_pieces(model, {"model": detached})
    if sharding is None:
        of_moments, shards_of_moments = stored_pieces(model, named)
    else:
        of_moments, shards_of_moments = _stored_fragments(model, named, sharding)
    return tensors | of_moments, shards | shards_of_moments


def stored_pieces(model: ModelPart, held: Held) -> Stored:
    """What is held of each kind for the parameters, in the parameters' shapes."""
    tensors: dict[str, Tensor] = {}
    shards: dict[str, Shard] = {}
    for piece in model.pieces():
        for kind, by_parameter in held.items():
            if piece.parameter in by_parameter:  # frozen weights have no moments
                tensors[f"{kind}/{piece.stored}"] = piece.of(by_parameter[piece.parameter])
                shards[f"{kind}/{piece.stored}"] = piece.shard
    return tensors, shards


def _stored_fragments(model: ModelPart, held: Held, sharding: ShardedParameters) -> Stored:
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    shards: dict[str, Shard] = {}
    for piece in model.pieces():
        parameter = parameters[piece.parameter].detach()
        for kind, by_parameter in held.items():
            if piece.parameter in by_parameter:
                name, moment = f"{kind}/{piece.stored}", by_parameter[piece.parameter]
                tensors[name], shards[name] = _fragment(piece, parameter, moment, sharding)
    return tensors, shards


def _fragment(
    piece: Piece, parameter: Tensor, moment: Tensor, sharding: ShardedParameters
) -> tuple[Tensor, Fragment]:
    """What this replica has of a piece's moment: a part of that of the parameter, which is flat."""
    rows = piece.of(parameter)
    owned, all_owned = sharding.owned(rows), sharding.owned(parameter)
    begin = owned.storage_offset() - rows.storage_offset()
    at = owned.storage_offset() - all_owned.storage_offset()
    numbers = range(begin, begin + owned.numel())
    return moment[at : at + owned.numel()], Fragment.of(piece.shard, rows.shape, numbers)
