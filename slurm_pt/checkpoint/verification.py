"""Checking a checkpoint's files by all ranks together: each reads a share of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurm_pt.checkpoint import store
from slurm_pt.checkpoint.peers import Peers
from slurm_pt.checkpoint.store import FileRecord


def find_damage_together(
    peers: Peers, path: Path, records: Mapping[str, FileRecord] | None = None
) -> str | None:
    """What is damaged in a checkpoint, the same words on all ranks; None: nothing.

    `records` says what its files must be, where that is known better than from its manifest.
    """

    def verify_share() -> list[str]:
        files = store.read_manifest(path).files if records is None else records
        return store.verify_files(path, _share(files, peers))

    problems = [problem for part in peers.on_all(verify_share) for problem in part]
    return "; ".join(problems) or None


def _share(files: Mapping[str, FileRecord], peers: Peers) -> list[str]:
    """This rank's part of the files, such that all ranks read about as much."""
    by_size = sorted(files, key=lambda name: (-files[name].size_bytes, name))
    return by_size[peers.rank :: peers.world_size]
