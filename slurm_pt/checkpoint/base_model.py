"""Which weights an adapter checkpoint belongs to: it holds none of them itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_pt.checkpoint.store import MANIFEST, read_manifest
from slurm_pt.errors import CheckpointError

BASE = "base"
"""Key of the record in a checkpoint's common part; without it a checkpoint has all weights."""


@dataclass(frozen=True)
class BaseModel:
    """The frozen weights under some adapters: those of a checkpoint, or the initial ones."""

    path: str | None = None
    """Where the checkpoint was; it may have been moved since."""
    manifest_sha256: str | None = None
    """Of its manifest, which holds the checksums of all its files."""
    seed: int | None = None
    """Of the initial weights, where no checkpoint was loaded."""

    @classmethod
    def at(cls, path: Path) -> BaseModel:
        """A committed checkpoint. Raises CheckpointError if it has no weights of its own."""
        if BASE in read_manifest(path).common:
            raise CheckpointError(
                f"{path} holds adapters alone (lora.rank). To fix: merge them into their base with "
                "`slurm-pt convert to-hf`, and convert that with `slurm-pt convert from-hf`"
            )
        digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
        return cls(path=str(path.absolute()), manifest_sha256=digest)

    @classmethod
    def of(cls, common: Mapping[str, Any]) -> BaseModel | None:
        """What a checkpoint's common part says; None: it has its own weights."""
        return cls(**common[BASE]) if BASE in common else None

    def record(self) -> dict[str, Any]:
        """For a checkpoint's common part."""
        return {BASE: asdict(self)}

    def require(self, other: BaseModel) -> None:
        """Raise CheckpointError unless the other one has the same weights, wherever it is."""
        if (self.manifest_sha256, self.seed) != (other.manifest_sha256, other.seed):
            raise CheckpointError(
                f"these adapters were trained on {self}, and not on {other}. To fix: give them the "
                "base that they belong to (train.init_from, or --base), or begin another run"
            )

    def __str__(self) -> str:
        if self.path is None:
            return f"the initial weights of train.seed={self.seed}"
        return f"{self.path} (sha256 of its manifest: {(self.manifest_sha256 or '')[:12]}...)"
