"""Makes all that several ranks hold equal, once, before training starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_pt.parallel.shard import WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.parallel.model_part import ModelPart


@torch.no_grad()
def equalise(model: ModelPart, buffers: Iterable[Tensor], groups: ProcessGroups) -> None:
    """Give all ranks that hold a number its value on the first of them. Collective.

    Models are built with random weights: where ranks drew different ones, their gradients would
    be those of different models. In this order: copies of a tied parameter, tensor ranks, dp.
    """
    parameters = dict(model.named_parameters())
    tied = model.tied_parameter()
    if tied is not None and groups.embedding is not None:
        _copy_first(tied, groups.embedding)
    for piece in model.pieces():
        part = piece.of(parameters[piece.parameter])
        if piece.shard == WHOLE:
            _copy_first(part, groups.tp)
        elif piece.shard.parts < groups.layout.tp:
            _copy_first(part, groups.kv)
    held = list(buffers)
    for tensor in held:
        _copy_first(tensor, groups.tp)
    for tensor in [*parameters.values(), *held]:
        _copy_first(tensor, groups.dp)


def _copy_first(tensor: Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        copied = tensor.detach().contiguous()
        dist.broadcast(copied, group_src=0, group=group)
        tensor.copy_(copied)
