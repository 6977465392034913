"""Saving and resuming by all ranks of a job together.

A save stands in the way of training only while tensors are copied to host memory. A thread does
the rest (`saving`), talking to the other ranks over a process group that nothing else uses.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from slurm_pt.checkpoint import state
from slurm_pt.checkpoint.base_model import BaseModel
from slurm_pt.checkpoint.peers import Peers
from slurm_pt.checkpoint.resuming import Loader, Resumed
from slurm_pt.checkpoint.saving import Saver, Snapshot
from slurm_pt.checkpoint.tensor_index import require_storable
from slurm_pt.config.schema import CheckpointConfig
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.groups import ProcessGroups
from slurm_pt.parallel.shard import Shard

log = logging.getLogger(__name__)


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
        self._groups, self._config = groups, config
        self._listener = report or _log_event
        peers = Peers(groups.background, groups.rank)
        self._saver = Saver(
            folder,
            groups=groups,
            peers=peers,
            keep_last=config.keep_last,
            entry_timeout_s=entry_timeout_s,
            may_commit=may_commit,
            report=self._report,
        )
        self._loader = Loader(
            folder,
            groups=groups,
            peers=peers,
            verify=config.verify,
            may_commit=may_commit,
            report=self._report,
        )
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
        shards: Mapping[str, Shard],
        rank_state: dict[str, Any],
        common: dict[str, Any],
        wait: bool,
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save a step. Returns when the tensors are copied or, with `wait`, when it is committed.

        `tensors` are the same on all replicas; `own` are this rank's, of the same names and shapes
        on all of its stage. A save that fails without `wait` is reported, and training goes on.

        Raises:
            CheckpointError: with `wait`, this save failed; or a tensor can never be saved.
            RunFolderError: another job owns the run.
            LostRankError: a rank did not take part, in this or an earlier save.
        """
        called_at = time.monotonic()
        require_storable({**tensors, **(own or {})})
        self._join()
        self._failed = None
        mine = state.names_to_save(
            tensors, shards, layout=self._groups.layout, place=self._groups.place
        )
        own = own or {}
        copied = {name: tensors[name] for name in mine}
        copied |= {state.own_name(self._groups.rank, name): own[name] for name in own}
        snapshot = Snapshot(
            step=step,
            tensors=self._buffers.copy(copied),
            shards=dict(shards),
            fingerprint=state.fingerprint({**tensors, **_prefixed(own)}, shards),
            rank_state=json.dumps(rank_state).encode(),
            common=json.loads(json.dumps(common)),
            taken_at=called_at,
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
        self,
        tensors: Mapping[str, Tensor],
        *,
        shards: Mapping[str, Shard],
        own: Mapping[str, Tensor] | None = None,
    ) -> Resumed | None:
        """Load the newest usable step into the tensors, in place; None when there is none at all.

        `Resumed.own` says what came into `own`.

        Raises:
            CheckpointError: there are checkpoints and none can be used, or the one to use does not
                fit these tensors.
        """
        return self.resume_into(lambda _path: tensors, shards=shards, own=own)

    def resume_into(
        self,
        allocate: Callable[[Path], Mapping[str, Tensor]],
        *,
        shards: Mapping[str, Shard] | None = None,
        own: Mapping[str, Tensor] | None = None,
    ) -> Resumed | None:
        """Like `resume`, for tensors that are only known once the checkpoint is.

        `allocate` takes the folder of the chosen checkpoint (`tensor_index.read_index` tells names,
        shapes and formats) and gives the tensors to fill.
        """
        resumed = self._loader.load(allocate, {} if shards is None else shards, own or {})
        if resumed is not None:
            self.last_committed = resumed.step
        return resumed

    def load_weights(
        self, path: Path, tensors: Mapping[str, Tensor], *, shards: Mapping[str, Shard]
    ) -> BaseModel:
        """Load tensors from a committed checkpoint of another run, in place; formats may differ.

        Returns which weights these now are.

        Raises:
            CheckpointError: it is damaged, or is not of this model.
        """
        return self._loader.load_weights(path, tensors, shards)

    # The save, in its thread ---------------------------------------------------------------------

    def _run(self, save: Snapshot) -> None:
        try:
            seconds = self._saver.save(save, known_whole=self.last_committed)
            self.last_save_s = self.last_save_s if seconds is None else seconds
            self.last_committed = save.step
        except CheckpointError as error:
            self._failed = error
            self._report("checkpoint_failed", {"step": save.step, "reason": str(error)})
        except Exception as error:  # whatever it is, the thread has nobody to raise it to
            self._ended = error
            self._report("checkpoint_failed", {"step": save.step, "reason": str(error)})

    def _report(self, event: str, figures: dict[str, Any]) -> None:
        try:
            self._listener(event, figures)
        except Exception:  # on a full disk the record of it fails too; that must not end the run
            log.exception("event=report_failed about=%s", event)

    def _join(self) -> None:
        self.close()
        if self._ended is not None:
            raise self._ended


def _prefixed(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by names that do not collide with those of others."""
    return {state.OWN + name: tensor for name, tensor in own.items()}


def _log_event(event: str, figures: dict[str, Any]) -> None:
    log.info("event=%s %s", event, " ".join(f"{key}={value}" for key, value in figures.items()))
