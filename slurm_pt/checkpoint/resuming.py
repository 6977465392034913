"""Loading a checkpoint by all ranks together: the newest usable one, into tensors of any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurm_pt.checkpoint import state, store
from slurm_pt.checkpoint.base_model import BaseModel
from slurm_pt.checkpoint.peers import Peers
from slurm_pt.checkpoint.store import Manifest, StoredCheckpoint
from slurm_pt.checkpoint.tensor_files import read_part
from slurm_pt.checkpoint.tensor_index import StoredTensor, read_index
from slurm_pt.checkpoint.verification import find_damage_together
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.groups import ProcessGroups
from slurm_pt.parallel.shard import Shard
from slurm_pt.plan.layout import ParallelLayout, Place

_SHOWN_PROBLEMS = 10


class OwnState(Enum):
    """What was loaded of the tensors that belong to one rank alone."""

    absent = "absent"
    """None were asked for, or none are stored."""
    exact = "exact"
    """Those that this rank saved."""
    mean = "mean"
    """With another number of replicas: the mean over those that saved it."""
    dropped = "dropped"
    """Nothing: the model was split into other parts, or other tensors are stored."""


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
    own: OwnState = OwnState.absent


@dataclass(frozen=True)
class _Opened:
    """A checkpoint that was looked into, before its tensors are loaded."""

    manifest: Manifest
    index: Mapping[str, StoredTensor]
    rank_state: dict[str, Any] | None
    world_changed: bool


class Loader:
    """Reads checkpoints of one folder; every call is made by all ranks together."""

    def __init__(
        self,
        folder: Path,
        *,
        groups: ProcessGroups,
        peers: Peers,
        verify: bool,
        may_commit: Callable[[], None],
        report: Callable[[str, dict[str, Any]], None],
    ):
        self._folder, self._groups, self._peers, self._verify = folder, groups, peers, verify
        self._may_commit, self._report = may_commit, report

    def load(
        self,
        allocate: Callable[[Path], Mapping[str, Tensor]],
        shards: Mapping[str, Shard],
        own: Mapping[str, Tensor],
    ) -> Resumed | None:
        """Fill the tensors that `allocate` gives for a checkpoint's folder; None: there is none.

        And `own`, where the model is split as it was.

        Raises:
            CheckpointError: there are checkpoints and none can be used, or the one to use does not
                fit these tensors.
        """
        found, skipped = self._choose()
        if found is None:
            return None
        opened = self._peers.on_each(lambda: self._open(found.path))
        tensors = self._peers.on_each(lambda: allocate(found.path))
        shared = {n: entry for n, entry in opened.index.items() if not n.startswith(state.OWN)}
        self._load(found.path, shared, tensors, shards)
        return Resumed(
            step=found.step,
            common=dict(opened.manifest.common),
            rank_state=opened.rank_state,
            world_changed=opened.world_changed,
            skipped=tuple(store.describe_skipped(skipped, found)),
            own=self._load_own(found.path, opened, own),
        )

    def load_weights(
        self, path: Path, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]
    ) -> BaseModel:
        """Fill these tensors from one committed checkpoint, of any number format; says which.

        What else it holds (an optimizer's state) is left there.

        Raises:
            CheckpointError: it is damaged, or is not of this model.
        """
        stored = self._peers.on_rank_0(lambda: store.inspect(path))
        problem = stored.problem or find_damage_together(self._peers, path)
        if problem is not None:
            raise CheckpointError(f"{path} cannot be used: {problem}")
        loaded = self._peers.on_rank_0(lambda: BaseModel.at(path))
        index = self._peers.on_each(lambda: read_index(path))
        held = {name: entry for name, entry in index.items() if name in tensors}
        self._load(path, held, tensors, shards, any_format=True)
        return loaded

    def _choose(self) -> tuple[StoredCheckpoint | None, list[StoredCheckpoint]]:
        """The step that all ranks load, and the newer ones that cannot be loaded."""

        def look() -> list[StoredCheckpoint]:
            self._may_commit()
            store.clean(self._folder)
            return store.list_checkpoints(self._folder)

        def find_damage(path: Path) -> str | None:
            return find_damage_together(self._peers, path) if self._verify else None

        def skip(checkpoint: StoredCheckpoint) -> None:
            reason = checkpoint.problem
            self._report("checkpoint_skipped", {"step": checkpoint.step, "reason": reason})

        return store.newest_usable(self._peers.on_rank_0(look), find_damage, skip)

    def _open(self, path: Path) -> _Opened:
        """Everything but the tensors."""
        manifest = store.read_manifest(path)
        world_changed = manifest.layout != asdict(self._groups.layout)
        rank_state = None
        if not world_changed:
            rank_state = json.loads((path / store.rank_file(self._groups.rank)).read_bytes())
        return _Opened(manifest, read_index(path), rank_state, world_changed)

    def _load_own(self, path: Path, opened: _Opened, own: Mapping[str, Tensor]) -> OwnState:
        """Fill this rank's own tensors."""
        if not own or not any(name.startswith(state.OWN) for name in opened.index):
            return OwnState.absent
        then, now = ParallelLayout(**opened.manifest.layout), self._groups.layout
        if (then.tp, then.pp) != (now.tp, now.pp):
            return OwnState.dropped
        here = self._groups.place
        replicas = [
            then.rank(Place(here.tp_rank, here.pp_rank, dp_rank)) for dp_rank in range(then.dp)
        ]
        ranks = [self._groups.rank] if then == now else replicas
        fits = all(_fits(opened.index, rank, own) for rank in ranks)
        if not all(self._peers.gather(fits)):
            return OwnState.dropped
        if then == now:
            self._load_own_of(path, opened.index, self._groups.rank, own)
            return OwnState.exact
        part = {name: torch.empty_like(tensor) for name, tensor in own.items()}
        for tensor in own.values():
            tensor.zero_()
        for rank in replicas:
            self._load_own_of(path, opened.index, rank, part)
            for name, tensor in own.items():
                tensor.add_(part[name], alpha=1.0 / then.dp)
        return OwnState.mean

    def _load_own_of(
        self, path: Path, index: Mapping[str, StoredTensor], rank: int, own: Mapping[str, Tensor]
    ) -> None:
        """Fill the tensors with those that belong to a rank of the stored layout."""
        begin = state.own_name(rank, "")
        stored = {name: entry for name, entry in index.items() if name.startswith(begin)}
        self._load(path, stored, {begin + name: tensor for name, tensor in own.items()}, {})

    def _load(
        self,
        path: Path,
        index: Mapping[str, StoredTensor],
        tensors: Mapping[str, Tensor],
        shards: Mapping[str, Shard],
        *,
        any_format: bool = False,
    ) -> None:
        judged = self._peers.gather(
            (state.mismatches(index, tensors, shards, any_format=any_format), list(tensors))
        )
        problems = [problem for part, _ in judged for problem in part]
        asked_for = {name for _, names in judged for name in names}
        problems += [f"{name}: expected nothing, found it" for name in index.keys() - asked_for]
        if problems:
            raise _does_not_fit(path, problems)
        self._peers.on_each(lambda: read_part(path, index, tensors, shards))


def _fits(index: Mapping[str, StoredTensor], rank: int, own: Mapping[str, Tensor]) -> bool:
    """Whether a rank of the stored layout saved tensors of these names and shapes of its own."""
    begin = state.own_name(rank, "")
    stored = {
        name.removeprefix(begin): (entry.shape, entry.dtype)
        for name, entry in index.items()
        if name.startswith(begin)
    }
    return stored == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}


def _does_not_fit(path: Path, problems: Iterable[str]) -> CheckpointError:
    distinct = sorted(set(problems))
    shown = "\n".join(f"  - {problem}" for problem in distinct[:_SHOWN_PROBLEMS])
    more = len(distinct) - _SHOWN_PROBLEMS
    return CheckpointError(
        f"{path} does not fit this model:\n{shown}"
        + (f"\n  and {more} more" if more > 0 else "")
        + "\nTo fix: use the model.*, lora.*, train.dtype, train.local_steps and train.outer that "
        "it was saved with, or another run folder."
    )
