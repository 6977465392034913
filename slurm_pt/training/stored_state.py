"""What a run saves: what all replicas have, and what belongs to one rank alone."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

from slurm_pt.parallel.low_rank import FACTORS
from slurm_pt.parallel.stored import Stored, stored_pieces, stored_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from slurm_pt.parallel.reduction import Reduction
    from slurm_pt.parallel.shard import Shard
    from slurm_pt.training.local_updates import LocalUpdates
    from slurm_pt.training.optimizer import NamedAdamW
    from slurm_pt.training.rank_model import RankModel


class StoredState(NamedTuple):
    """The tensors themselves, by stored name, to save from or to load into."""

    tensors: dict[str, Tensor]
    """The same on all replicas; any layout can load them."""
    shards: dict[str, Shard]
    own: dict[str, Tensor]
    """This rank's; ranks that hold the same part of the model can load them, or their mean."""


def stored_state(
    model: RankModel,
    optimizer: NamedAdamW,
    *,
    reduction: Reduction,
    local: LocalUpdates | None,
) -> StoredState:
    """Everything to be saved. With local updates, all replicas have the agreed weights."""
    tensors, shards = stored_tensors(
        model, optimizer.state(), weights=model.trained_parameters(), sharding=model.sharding
    )
    if local is None:
        # Named by the parameters that it is about: of others it must not be taken over.
        about = digest_of(model)
        own = {f"{about}/{name}": tensor for name, tensor in reduction.state().items()}
        return StoredState(tensors, shards, own)
    agreed, shards = stored_pieces(model, local.state())
    return StoredState(agreed, shards, own=tensors)


def digest_of(model: RankModel) -> str:
    """Ten digits that name the trained parameters of a rank and their shapes."""
    trained = [(name, tuple(p.shape)) for name, p in model.trained_parameters().items()]
    return hashlib.sha256(json.dumps(trained).encode()).hexdigest()[:10]


def base_tensors(model: RankModel) -> Stored:
    """The weights to be loaded from another run's checkpoint.

    All but adapters, which a run begins for itself.
    """
    parameters = dict(model.named_parameters())
    weights = {
        piece.parameter: parameters[piece.parameter].detach()
        for piece in model.pieces()
        if not piece.stored.endswith(FACTORS)
    }
    return stored_pieces(model, {"model": weights})
