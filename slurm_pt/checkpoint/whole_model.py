"""The weights of a checkpoint as one process reads them: boxes of whole tensors.

Adapters are merged into the base that they were trained on; layers that share weights all give the
ones they share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slurm_pt.checkpoint.base_model import BaseModel
from slurm_pt.checkpoint.store import find_damage, read_manifest
from slurm_pt.checkpoint.tensor_bytes import BoxReader
from slurm_pt.checkpoint.tensor_index import StoredTensor, read_index
from slurm_pt.errors import CheckpointError

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of one committed checkpoint."""

    path: Path
    index: Mapping[str, StoredTensor]
    reader: BoxReader

    @classmethod
    def of(cls, path: Path) -> StoredTensors:
        return cls(path, read_index(path), BoxReader(path))

    def read(
        self, name: str, begin: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """The box of a tensor that begins there and has this shape; default: all of it."""
        return self.reader.read(self.index[name], begin, shape)


@dataclass(frozen=True)
class WholeModel:
    """Weights by the names that they have in a model whose layers share nothing."""

    base: StoredTensors
    share_layers: int = 1
    adapters: StoredTensors | None = None
    scale: float = 0.0
    """Of the adapters: W + scale * B A."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError if there is no such tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """With adapters all weights have the format of these."""
        held = self._entry(name)
        return (
            held.dtype if self.adapters is None else next(iter(self.adapters.index.values())).dtype
        )

    def read(
        self, name: str, begin: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """The box of a tensor that begins there and has this shape; default: all of it."""
        stored = self._stored(name)
        weight = self.base.read(stored, begin, shape).to(self.dtype(name))
        layer, _, kind = stored.rpartition(".")
        a, b = f"{layer}.lora_a", f"{layer}.lora_b"
        if self.adapters is None or kind != "weight" or a not in self.adapters.index:
            return weight
        row, column = (0, 0) if begin is None else begin
        rank = self.adapters.index[a].shape[0]
        left = self.adapters.read(b, (row, 0), (weight.shape[0], rank))
        right = self.adapters.read(a, (0, column), (rank, weight.shape[1]))
        return torch.addmm(weight, left, right, alpha=self.scale)

    def _entry(self, name: str) -> StoredTensor:
        stored = self._stored(name)
        if stored not in self.base.index:
            raise CheckpointError(f"{self.base.path} has no {stored}: it is of another model")
        return self.base.index[stored]

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
