"""The weights of a checkpoint as one process reads them: whole, one tensor at a time.

Adapters are merged into the base that they were trained on; layers that share weights all give the
ones they share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slurm_pt.checkpoint.base_model import BaseModel
from slurm_pt.checkpoint.store import find_damage, read_manifest
from slurm_pt.checkpoint.tensor_files import StoredTensor, read_index, read_whole
from slurm_pt.errors import CheckpointError

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of one committed checkpoint."""

    path: Path
    index: Mapping[str, StoredTensor]

    @classmethod
    def of(cls, path: Path) -> StoredTensors:
        return cls(path, read_index(path))

    def read(self, name: str) -> Tensor:
        """Whole, put together by this process."""
        return read_whole(self.path, self.index[name])


@dataclass(frozen=True)
class WholeModel:
    """Weights by the names that they have in a model whose layers share nothing."""

    base: StoredTensors
    share_layers: int = 1
    adapters: StoredTensors | None = None
    scale: float = 0.0
    """Of the adapters: W + scale * B A."""

    def require(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless it has all of these."""
        for name in names:
            if self._stored(name) not in self.base.index:
                raise CheckpointError(
                    f"{self.base.path} has no {self._stored(name)}: it is of another model"
                )

    def read(self, name: str) -> Tensor:
        """A whole tensor. With adapters all are in the format of these."""
        stored = self._stored(name)
        weight = self.base.read(stored)
        if self.adapters is None:
            return weight
        layer, _, kind = stored.rpartition(".")
        a, b = f"{layer}.lora_a", f"{layer}.lora_b"
        weight = weight.to(next(iter(self.adapters.index.values())).dtype)
        if kind != "weight" or a not in self.adapters.index:
            return weight
        factors = self.adapters.read(b), self.adapters.read(a)
        return torch.addmm(weight, *factors, alpha=self.scale)

    def _stored(self, name: str) -> str:
        """Of layers that share their weights those of the first are stored."""

        def first(match: re.Match[str]) -> str:
            index = int(match[1])
            return f"layers.{index - index % self.share_layers}."

        return "model/" + _LAYER.sub(first, name, count=1)


def open_model(
    checkpoint: Path, *, share_layers: int = 1, scale: float = 0.0, base: Path | None = None
) -> WholeModel:
    """The model of a committed checkpoint.

    Args:
        checkpoint: A folder `step_N`.
        share_layers: As `model.share_layers`.
        scale: Of its adapters, if it holds adapters alone.
        base: Where the base of the adapters is; None: where it was when they were trained.

    Raises:
        CheckpointError: The base is not known, damaged, or another one.
    """
    trained_on = BaseModel.of(read_manifest(checkpoint).common)
    if trained_on is None:
        if base is not None:
            raise CheckpointError(f"{checkpoint} has its own weights: leave --base out")
        return WholeModel(StoredTensors.of(checkpoint), share_layers)
    if base is None and trained_on.path is None:
        raise CheckpointError(
            f"{checkpoint} holds adapters on {trained_on}, of which there is no checkpoint: there "
            "is nothing to merge them into"
        )
    path = base or Path(trained_on.path or "")
    problem = find_damage(path)  # the manifest alone does not tell of the files
    if problem is not None:
        raise CheckpointError(
            f"{path}, the base of the adapters in {checkpoint}, cannot be used: {problem}. To fix: "
            "say where it is now with --base"
        )
    trained_on.require(BaseModel.at(path))
    adapters = StoredTensors.of(checkpoint)
    return WholeModel(StoredTensors.of(path), share_layers, adapters, scale)
