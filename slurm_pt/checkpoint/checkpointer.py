"""Saving and resuming by all ranks of a job together.

A save stands in the way of training only while tensors are copied to host memory. A thread does
the rest, talking to the other ranks over a process group that nothing else uses. Ranks agree after
each part, so that one with a full disk makes the save fail everywhere instead of leaving the
others waiting.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurm_pt.checkpoint import state, store
from slurm_pt.checkpoint.peers import LostRankError, Peers
from slurm_pt.checkpoint.random_state import capture_random_state, restore_random_state
from slurm_pt.checkpoint.store import FileRecord, Manifest, StoredCheckpoint
from slurm_pt.config.schema import CheckpointConfig
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.groups import ProcessGroups

if TYPE_CHECKING:
    from slurm_pt.checkpoint.tensor_files import StoredTensor

__all__ = [
    "Checkpointer",
    "LostRankError",
    "Resumed",
    "capture_random_state",
    "restore_random_state",
]

log = logging.getLogger(__name__)
_SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class Resumed:
    """What was loaded, besides the tensors."""

    step: int
    common: dict[str, Any]
    rank_state: dict[str, Any] | None
    """What this rank gave to `save`; None in another layout, where it belongs to no rank."""
    world_changed: bool
    skipped: tuple[str, ...]
    """Why newer checkpoints were passed over, one sentence each."""


@dataclass(frozen=True)
class _Opened:
    """A checkpoint that was looked into, before its tensors are loaded."""

    manifest: Manifest
    index: Mapping[str, StoredTensor]
    rank_state: dict[str, Any] | None
    world_changed: bool


@dataclass(frozen=True)
class _Save:
    """A snapshot on its way to disk."""

    step: int
    tensors: Mapping[str, Tensor]
    shard_dims: Mapping[str, int | None]
    fingerprint: str
    rank_state: bytes
    common: dict[str, Any]
    called_at: float


class Checkpointer:
    """The checkpoints of one run, from one rank's view; every call is made by all ranks.

    Args:
        folder: `<run>/checkpoints`, on a file system that all ranks share.
        groups: this rank's process groups; `background` is used by nobody else.
        config: when and how to save.
        may_commit: raises RunFolderError when another job owns the run by now; called on rank 0
            before anything is changed on disk.
        report: takes the name of an event and its figures; called on every rank, also from the
            thread. Events: checkpoint_committed, checkpoint_failed, checkpoint_skipped.
        entry_timeout_s: how long ranks wait for each other at the start of a save.
    """

    def __init__(
        self,
        folder: Path,
        *,
        groups: ProcessGroups,
        config: CheckpointConfig,
        may_commit: Callable[[], None],
        report: Callable[[str, dict[str, Any]], None] | None = None,
        entry_timeout_s: float = 300.0,
    ):
        self._folder, self._groups, self._config = folder, groups, config
        self._may_commit, self._listener = may_commit, report or _log_event
        self._entry_timeout_s = entry_timeout_s
        self._peers = Peers(groups.background, groups.rank)
        self._buffers = state.HostBuffers()
        self._thread: threading.Thread | None = None
        self._failed: CheckpointError | None = None
        """Why the last save failed, until someone was told."""
        self._ended: Exception | None = None
        """Why no save can be made any more: a rank is lost, or another job owns the run."""
        self.last_committed: int | None = None
        """The newest step that this attempt committed or resumed from."""
        self.last_save_s: float | None = None
        """Seconds from the call of `save` to the commit, of the last one committed."""
        self.last_stall_s: float | None = None
        """Seconds that the last `save` kept the caller from its work."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        shard_dims: Mapping[str, int | None],
        rank_state: dict[str, Any],
        common: dict[str, Any],
        wait: bool,
    ) -> None:
        """Save a step. Returns when the tensors are copied or, with `wait`, when it is committed.

        A save that fails without `wait` is reported, and training goes on.

        Raises:
            CheckpointError: with `wait`, this save failed.
            RunFolderError: another job owns the run.
            LostRankError: a rank did not take part, in this or an earlier save.
        """
        called_at = time.monotonic()
        self._join()
        self._failed = None
        mine = state.names_to_save(
            tensors, shard_dims, layout=self._groups.layout, place=self._groups.place
        )
        snapshot = _Save(
            step=step,
            tensors=self._buffers.copy({name: tensors[name] for name in mine}),
            shard_dims=dict(shard_dims),
            fingerprint=state.fingerprint(tensors, shard_dims),
            rank_state=json.dumps(rank_state).encode(),
            common=json.loads(json.dumps(common)),
            called_at=called_at,
        )
        if wait or not self._config.asynchronous:
            self._run(snapshot)
        else:
            # A daemon: a rank that fails in training must be able to exit in the middle of a save.
            self._thread = threading.Thread(
                target=self._run, args=(snapshot,), name=f"save-{step}", daemon=True
            )
            self._thread.start()
        self.last_stall_s = time.monotonic() - called_at
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when the save under way is committed.

        Raises:
            CheckpointError: the last save failed, and this was not raised before.
        """
        self._join()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Let the save under way end, well or not (a failure was reported already).

        Raises nothing, and `save` may be called again.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def resume(
        self, tensors: Mapping[str, Tensor], *, shard_dims: Mapping[str, int | None]
    ) -> Resumed | None:
        """Load the newest usable step into the tensors, in place; None when there is none at all.

        Raises:
            CheckpointError: there are checkpoints and none can be used, or the one to use does not
                fit these tensors.
        """
        return self.resume_into(lambda _path: tensors, shard_dims=shard_dims)

    def resume_into(
        self,
        allocate: Callable[[Path], Mapping[str, Tensor]],
        *,
        shard_dims: Mapping[str, int | None] | None = None,
    ) -> Resumed | None:
        """Like `resume`, for tensors that are only known once the checkpoint is.

        `allocate` takes the folder of the chosen checkpoint (`tensor_files.read_index` tells names,
        shapes and formats) and gives the tensors to fill.
        """
        found, skipped = self._choose()
        if found is None:
            return None
        opened = self._peers.on_each(lambda: self._open(found.path))
        tensors = self._peers.on_each(lambda: allocate(found.path))
        self._load(found.path, opened.index, tensors, shard_dims or {})
        self.last_committed = found.step
        return Resumed(
            step=found.step,
            common=dict(opened.manifest.common),
            rank_state=opened.rank_state,
            world_changed=opened.world_changed,
            skipped=tuple(store.describe_skipped(skipped, found)),
        )

    # The save, in its thread ---------------------------------------------------------------------

    def _run(self, save: _Save) -> None:
        try:
            self._save_and_commit(save)
        except CheckpointError as error:
            self._failed = error
            self._report("checkpoint_failed", {"step": save.step, "reason": str(error)})
        except Exception as error:  # whatever it is, the thread has nobody to raise it to
            self._ended = error
            self._report("checkpoint_failed", {"step": save.step, "reason": str(error)})

    def _save_and_commit(self, save: _Save) -> None:
        self._peers.meet(f"save(step={save.step})", self._entry_timeout_s)
        _check_agreement(
            self._peers.gather((save.step, save.fingerprint, self._groups.place.pp_rank))
        )
        temporary = self._prepare(save.step)
        if temporary is None:
            self.last_committed = save.step
            self._report("checkpoint_committed", {"step": save.step, "existed": True})
            return
        try:
            records = self._write(save, temporary)
            self._peers.on_rank_0(lambda: self._commit(save, temporary, records))
        except CheckpointError:
            # All ranks have stopped writing. On a full disk the next save needs this space.
            if self._groups.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.last_save_s = time.monotonic() - save.called_at
        self._read_back(save.step, records)
        self.last_committed = save.step
        size = sum(record.size_bytes for record in records.values())
        self._report(
            "checkpoint_committed",
            {"step": save.step, "seconds": self.last_save_s, "size_bytes": size},
        )
        self._prune(save.step)

    def _prepare(self, step: int) -> Path | None:
        """The folder to write to; None when the step is committed already, and whole."""

        def prepare() -> Path | None:
            self._may_commit()
            return store.prepare(self._folder, step)

        temporary = self._peers.on_rank_0(prepare)
        if temporary is not None or step == self.last_committed:
            return temporary
        path = store.checkpoint_path(self._folder, step)
        if self._verify(path) is None:
            return None
        self._peers.on_rank_0(lambda: store.set_aside(path))
        return self._peers.on_rank_0(prepare)

    def _write(self, save: _Save, temporary: Path) -> dict[str, FileRecord]:
        """The records of all files of all ranks, when all of them are on disk."""
        # DCP takes 2 s to import. In this thread that time is training's, and a run that has
        # nothing to resume does not wait for it at its start.
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

        from slurm_pt.checkpoint.block import BlockSavePlanner
        from slurm_pt.checkpoint.tensor_files import TensorFileWriter

        writer = TensorFileWriter(temporary, self._groups.rank)
        try:
            dcp_save(
                state.save_tree(save.tensors, save.shard_dims, self._groups),
                storage_writer=writer,
                planner=BlockSavePlanner(),
                process_group=self._groups.background,
            )
        except CheckpointException as error:  # not an Exception: it would end the thread
            raise _from_dcp(error) from None

        def write_own() -> dict[str, FileRecord]:
            name = store.rank_file(self._groups.rank)
            record = store.write_file(temporary / name, save.rank_state)
            store.sync_folder(temporary)
            return {**writer.records, name: record}

        return _merged(self._peers.on_all(write_own))

    def _commit(self, save: _Save, temporary: Path, records: dict[str, FileRecord]) -> None:
        manifest = Manifest(
            step=save.step,
            layout=_layout(self._groups),
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
        damage = self._verify(store.checkpoint_path(self._folder, step), records)
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
            store.prune(self._folder, self._config.keep_last, verified=step)
        except OSError as error:  # the new checkpoint is safe; old ones are only in the way
            log.warning("event=prune_failed reason=%s", error)

    # The load ------------------------------------------------------------------------------------

    def _choose(self) -> tuple[StoredCheckpoint | None, list[StoredCheckpoint]]:
        """The step that all ranks load, and the newer ones that cannot be loaded."""

        def look() -> list[StoredCheckpoint]:
            self._may_commit()
            store.clean(self._folder)
            return store.list_checkpoints(self._folder)

        skipped: list[StoredCheckpoint] = []
        for candidate in self._peers.on_rank_0(look):
            problem = candidate.problem
            if problem is None and self._config.verify:
                problem = self._verify(candidate.path)
            if problem is None:
                return candidate, skipped
            store.refuse_newer(candidate)
            skipped.append(replace(candidate, problem=problem))
            self._report("checkpoint_skipped", {"step": candidate.step, "reason": problem})
        if skipped:
            raise store.none_usable(self._folder, skipped)
        return None, []

    def _verify(self, path: Path, records: Mapping[str, FileRecord] | None = None) -> str | None:
        """What is damaged in a checkpoint, found by all ranks together: each reads a share."""

        def verify_share() -> list[str]:
            files = store.read_manifest(path).files if records is None else records
            return store.verify_files(path, self._share(files))

        problems = _flat(self._peers.on_all(verify_share))
        return "; ".join(problems) or None

    def _share(self, files: Mapping[str, FileRecord]) -> list[str]:
        """This rank's part of the files, such that all ranks read about as much."""
        by_size = sorted(files, key=lambda name: (-files[name].size_bytes, name))
        return by_size[self._groups.rank :: self._groups.layout.world_size]

    def _open(self, path: Path) -> _Opened:
        """Everything but the tensors."""
        from slurm_pt.checkpoint.tensor_files import read_index

        manifest = store.read_manifest(path)
        world_changed = manifest.layout != _layout(self._groups)
        rank_state = None
        if not world_changed:
            rank_state = json.loads((path / store.rank_file(self._groups.rank)).read_bytes())
        return _Opened(manifest, read_index(path), rank_state, world_changed)

    def _load(
        self,
        path: Path,
        index: Mapping[str, StoredTensor],
        tensors: Mapping[str, Tensor],
        shard_dims: Mapping[str, int | None],
    ) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

        from slurm_pt.checkpoint.block import BlockLoadPlanner
        from slurm_pt.checkpoint.tensor_files import TensorFileReader

        tp = self._groups.layout.tp
        judged = self._peers.gather(
            (state.mismatches(index, tensors, shard_dims, tp=tp), list(tensors))
        )
        problems = _flat(problems for problems, _ in judged)
        asked_for = set(_flat(names for _, names in judged))
        problems += [f"{name}: expected nothing, found it" for name in index.keys() - asked_for]
        if problems:
            raise _does_not_fit(path, problems)
        try:
            dcp_load(
                dict(state.save_tree(tensors, shard_dims, self._groups)),
                storage_reader=TensorFileReader(path, index),
                planner=BlockLoadPlanner(),
                process_group=self._groups.background,
            )
        except CheckpointException as error:
            raise _from_dcp(error) from None

    def _report(self, event: str, figures: dict[str, Any]) -> None:
        try:
            self._listener(event, figures)
        except Exception:  # on a full disk the record of it fails too; that must not end the run
            log.exception("event=report_failed about=%s", event)

    def _join(self) -> None:
        self.close()
        if self._ended is not None:
            raise self._ended


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
                "tensors (names, formats, shapes or shard dims): some would not be saved"
            )


def _from_dcp(error: Any) -> CheckpointError:
    """One line for each rank that failed, out of DCP's exception."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    return CheckpointError(
        "; ".join(f"rank {rank}: {failure}" for rank, failure in sorted(failures.items()))
    )


def _does_not_fit(path: Path, problems: Iterable[str]) -> CheckpointError:
    distinct = sorted(set(problems))
    shown = "\n".join(f"  - {problem}" for problem in distinct[:_SHOWN_PROBLEMS])
    more = len(distinct) - _SHOWN_PROBLEMS
    return CheckpointError(
        f"{path} does not fit this model:\n{shown}"
        + (f"\n  and {more} more" if more > 0 else "")
        + "\nTo fix: use the model.* and train.dtype that it was saved with, or another run folder."
    )


def _layout(groups: ProcessGroups) -> dict[str, int]:
    return {"tp": groups.layout.tp, "pp": groups.layout.pp, "dp": groups.layout.dp}


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("slurm_pt")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {"slurm_pt": own, "torch": torch.__version__, "python": platform.python_version()}


def _flat(lists: Iterable[list[str]]) -> list[str]:
    return [item for part in lists for item in part]


def _merged(parts: Iterable[Mapping[str, FileRecord]]) -> dict[str, FileRecord]:
    return {name: record for part in parts for name, record in part.items()}


def _log_event(event: str, figures: dict[str, Any]) -> None:
    log.info("event=%s %s", event, " ".join(f"{key}={value}" for key, value in figures.items()))
