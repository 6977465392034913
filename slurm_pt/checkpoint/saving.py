"""A snapshot's way to disk: all ranks write, rank 0 commits, all read it back, old ones go.

Ranks agree after each part, so that one with a full disk makes the save fail everywhere instead
of leaving the others waiting.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurm_pt.checkpoint import store
from slurm_pt.checkpoint.peers import LostRankError, Peers
from slurm_pt.checkpoint.store import FileRecord, Manifest
from slurm_pt.checkpoint.tensor_files import join_indices, write_part
from slurm_pt.checkpoint.tensor_index import INDEX, StoredTensor, render_index
from slurm_pt.checkpoint.verification import find_damage_together
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.groups import ProcessGroups
from slurm_pt.parallel.shard import Shard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """What this rank saves of a step, in host memory."""

    step: int
    tensors: Mapping[str, Tensor]
    shards: Mapping[str, Shard]
    fingerprint: str
    """Of all tensors of the rank, also of those that another rank saves."""
    rank_state: bytes
    common: dict[str, Any]
    taken_at: float
    """Monotonic seconds."""


class Saver:
    """Writes snapshots to one folder; every call is made by all ranks together."""

    def __init__(
        self,
        folder: Path,
        *,
        groups: ProcessGroups,
        peers: Peers,
        keep_last: int,
        entry_timeout_s: float,
        may_commit: Callable[[], None],
        report: Callable[[str, dict[str, Any]], None],
    ):
        self._folder, self._groups, self._peers = folder, groups, peers
        self._keep_last, self._entry_timeout_s = keep_last, entry_timeout_s
        self._may_commit, self._report = may_commit, report

    def save(self, save: Snapshot, *, known_whole: int | None) -> float | None:
        """Seconds from the snapshot to the commit; None: the step was there already, and whole.

        `known_whole` is a step that this attempt committed or read: not verified again.

        Raises:
            CheckpointError: this save failed; the next one may work.
            RunFolderError, LostRankError: no save can work any more.
        """
        self._peers.meet(f"save(step={save.step})", self._entry_timeout_s)
        _check_agreement(
            self._peers.gather((save.step, save.fingerprint, self._groups.place.pp_rank))
        )
        temporary = self._prepare(save.step, known_whole)
        if temporary is None:
            self._report("checkpoint_committed", {"step": save.step, "existed": True})
            return None
        try:
            records = self._write(save, temporary)
            self._peers.on_rank_0(lambda: self._commit(save, temporary, records))
        except CheckpointError:
            # All ranks have stopped writing. On a full disk the next save needs this space.
            if self._groups.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        seconds = time.monotonic() - save.taken_at
        self._read_back(save.step, records)
        size = sum(record.size_bytes for record in records.values())
        self._report(
            "checkpoint_committed",
            {"step": save.step, "seconds": seconds, "size_bytes": size},
        )
        self._prune(save.step)
        return seconds

    def _prepare(self, step: int, known_whole: int | None) -> Path | None:
        """The folder to write to; None when the step is committed already, and whole."""

        def prepare() -> Path | None:
            self._may_commit()
            return store.prepare(self._folder, step)

        temporary = self._peers.on_rank_0(prepare)
        if temporary is not None or step == known_whole:
            return temporary
        path = store.checkpoint_path(self._folder, step)
        if find_damage_together(self._peers, path) is None:
            return None
        self._peers.on_rank_0(lambda: store.set_aside(path))
        return self._peers.on_rank_0(prepare)

    def _write(self, save: Snapshot, temporary: Path) -> dict[str, FileRecord]:
        """The records of all files of all ranks, when all of them are on disk."""
        rank = self._groups.rank

        def write() -> tuple[dict[str, FileRecord], dict[str, StoredTensor]]:
            name = store.rank_file(rank)
            records = {name: store.write_file(temporary / name, save.rank_state)}
            written = write_part(temporary, rank, save.tensors, save.shards)
            if written is not None:
                records[written.file] = written.record
            store.sync_folder(temporary)
            return records, {} if written is None else written.index

        parts = self._peers.on_all(write)

        def write_index() -> FileRecord:
            index = render_index(join_indices(index for _, index in parts))
            return store.write_file(temporary / INDEX, index.encode())

        records = {name: record for part, _ in parts for name, record in part.items()}
        return {**records, INDEX: self._peers.on_rank_0(write_index)}

    def _commit(self, save: Snapshot, temporary: Path, records: dict[str, FileRecord]) -> None:
        manifest = Manifest(
            step=save.step,
            layout=asdict(self._groups.layout),
            world_size=self._groups.layout.world_size,
            versions=_versions(),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            files=records,
            common=save.common,
        )
        self._may_commit()
        store.commit(temporary, manifest)

    def _read_back(self, step: int, records: Mapping[str, FileRecord]) -> None:
        """Return when the committed files were read and are what was meant to be written.

        After the commit, not before: should the job be killed now, the step is already safe.
        """
        damage = find_damage_together(
            self._peers, store.checkpoint_path(self._folder, step), records
        )
        if damage is not None:
            raise CheckpointError(
                f"step {step} was committed, but reads back damaged: {damage}. "
                "Older checkpoints were kept"
            )

    def _prune(self, step: int) -> None:
        """Delete old steps; the new one has just been read back."""
        if self._groups.rank != 0:
            return
        try:
            store.prune(self._folder, self._keep_last, verified=step)
        except OSError as error:  # the new checkpoint is safe; old ones are only in the way
            log.warning("event=prune_failed reason=%s", error)


def _check_agreement(heads: list[tuple[int, str, int]]) -> None:
    """All ranks save one step, and ranks of a stage hold the same tensors."""
    steps = {rank: step for rank, (step, _, _) in enumerate(heads)}
    if len(set(steps.values())) > 1:
        raise LostRankError(f"ranks save different steps (rank: step): {steps}")
    first_of_stage: dict[int, int] = {}
    for rank, (_, fingerprint, stage) in enumerate(heads):
        first = first_of_stage.setdefault(stage, rank)
        if heads[first][1] != fingerprint:
            raise CheckpointError(
                f"ranks {first} and {rank} are both of pipeline stage {stage}, but hold different "
                "tensors (names, formats, shapes or shards): some would not be saved"
            )


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("slurm_pt")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {"slurm_pt": own, "torch": torch.__version__, "python": platform.python_version()}
