"""Checkpoints as folders: how one is committed, found, checked and removed. No torch here.

    checkpoints/
      step_00000012/              committed: it has this name, and a manifest
        manifest.json             what is here: step, layout, versions, size and sha256 of each file
        tensors.json              where each tensor is (tensor_index.py)
        rank_00003.safetensors    the tensors that rank 3 wrote
        rank_00003.json           what belongs to rank 3 alone (random state)
      step_00000013.tmp/          being written, or left by an attempt that died
      step_00000011.damaged-1/    a damaged one that was moved aside to save its step again
      .pruned-step_00000010/      being deleted

The commit is one rename of the folder, after everything in it is on disk. There is no pointer
file that could be wrong: the newest checkpoint is found by looking at the folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_pt.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

_COMMITTED = re.compile(r"step_(\d{8,})")
_TEMPORARY = re.compile(r"step_(\d{8,})\.tmp")
_PRUNED_PREFIX = ".pruned-"
_HASH_THREADS = 4
_READ_BYTES = 1 << 20


class NewerFormatError(CheckpointError):
    """The checkpoint was written by a newer slurm_pt: not damaged, and not ours to judge."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must look like."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about a checkpoint without reading a tensor."""

    step: int
    layout: Mapping[str, int]
    """Degrees tp, pp, dp of the ranks that wrote it."""
    world_size: int
    versions: Mapping[str, str]
    time: str
    """When it was written, ISO 8601 in UTC."""
    files: Mapping[str, FileRecord]
    common: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON from rank 0."""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class StoredCheckpoint:
    """A committed step on disk; `problem` says why it cannot be used."""

    step: int
    path: Path
    problem: str | None = None
    newer_format: bool = False
    """The problem is that a newer slurm_pt wrote it."""

    def __str__(self) -> str:
        return f"{self.path.name}: {self.problem or 'usable'}"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the committed checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def rank_file(rank: int) -> str:
    """Name of the file that belongs to one rank alone."""
    return f"rank_{rank:05d}.json"


# Writing -----------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> FileRecord:
    """The record of a file that is on disk, not only in the page cache, on return."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on disk: without it a fsynced file may have no name after a crash."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prepare(folder: Path, step: int) -> Path | None:
    """An empty temporary folder for a step; None when the step is committed and looks whole.

    Sizes are compared, not checksums: who wants more calls `verify_files` and, on a problem,
    `set_aside`.
    """
    final = checkpoint_path(folder, step)
    if final.exists():
        if inspect(final).problem is None:
            return None
        set_aside(final)
    temporary = final.with_name(final.name + ".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    sync_folder(folder)
    return temporary


def set_aside(path: Path) -> Path:
    """The new place of a damaged checkpoint, out of the way but there to be looked at.

    Raises:
        NewerFormatError: it is a newer slurm_pt's, which is another thing than damaged.
    """
    refuse_newer(inspect(path))
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(target)
    return target


def commit(temporary: Path, manifest: Manifest) -> Path:
    """The committed folder. After this returns, no crash can take the checkpoint away.

    The files that the manifest names must be on disk already (`write_file`).
    """
    text = json.dumps(asdict(manifest), indent=1, sort_keys=True)
    write_file(temporary / MANIFEST, text.encode())
    sync_folder(temporary)
    final = checkpoint_path(temporary.parent, manifest.step)
    # rename(2) refuses a target folder that has files in it: a committed step is never replaced.
    temporary.rename(final)
    sync_folder(temporary.parent)
    return final


# Looking -----------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """The manifest in a checkpoint folder.

    Raises:
        NewerFormatError: a newer slurm_pt wrote it.
        CheckpointError: it is missing or cannot be understood.
    """
    try:
        content = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{MANIFEST} has format version {version}, and this slurm_pt reads up to "
            f"{FORMAT_VERSION}: use the slurm_pt that wrote it, or a newer one"
        )
    try:
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(**{**content, "files": files})
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} is not a manifest: {error!r}") from None
    if not files or not isinstance(manifest.common, dict):
        raise CheckpointError(f"{MANIFEST} is not a manifest: it names no files, or no values")
    return manifest


def inspect(path: Path) -> StoredCheckpoint:
    """A checkpoint folder after a look at its manifest and at the size of each file.

    Raises CheckpointError if the folder's name is not that of a committed checkpoint.
    """
    match = _COMMITTED.fullmatch(path.name)
    if match is None:
        inside = sorted(
            found
            for folder in (path, path / "checkpoints")
            if folder.is_dir()
            for found in folder.iterdir()
            if _COMMITTED.fullmatch(found.name)
        )
        hint = f", such as {inside[-1]}" if inside else ""
        raise CheckpointError(
            f"{path} is no committed checkpoint: give a folder checkpoints/step_N of a run{hint}"
        )
    step = int(match.group(1))
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        newer = isinstance(error, NewerFormatError)
        return StoredCheckpoint(step, path, str(error), newer_format=newer)
    if manifest.step != step:
        problem = f"{MANIFEST} is of step {manifest.step}, the folder of step {step}"
        return StoredCheckpoint(step, path, problem)
    for name, record in manifest.files.items():
        problem_of_file = _size_problem(path / name, record)
        if problem_of_file is not None:
            return StoredCheckpoint(step, path, problem_of_file)
    return StoredCheckpoint(step, path)


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """Every committed step, newest first, judged by manifest and file sizes."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if _COMMITTED.fullmatch(path.name))
    return sorted(map(inspect, found), key=lambda stored: stored.step, reverse=True)


def verify_files(path: Path, names: Iterable[str]) -> list[str]:
    """What is wrong with these files of a checkpoint, by size and checksum; empty: nothing.

    Ranks can each take a share of the names.
    """
    files = read_manifest(path).files

    def problem_of(name: str) -> str | None:
        if name not in files:
            return f"{name} is not in {MANIFEST}"
        return _size_problem(path / name, files[name]) or _checksum_problem(
            path / name, files[name]
        )

    # hashlib and read() let go of the interpreter lock, so that threads do help.
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return [problem for problem in pool.map(problem_of, names) if problem is not None]


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, all of its checksums compared by this process; or None."""
    try:
        problems = verify_files(path, read_manifest(path).files)
    except CheckpointError as error:
        problems = [str(error)]
    return "; ".join(problems) or None


def newest_usable(
    stored: Sequence[StoredCheckpoint],
    find_damage: Callable[[Path], str | None],
    skip: Callable[[StoredCheckpoint], None],
) -> tuple[StoredCheckpoint | None, list[StoredCheckpoint]]:
    """The newest checkpoint that can be used, and the newer ones that were skipped.

    Of `stored`, newest first. (None, []) when there is no checkpoint at all.

    Raises:
        NewerFormatError: the newest one is a newer slurm_pt's; going on from an older one would
            throw its steps away.
        CheckpointError: there are checkpoints, and none can be used.
    """
    skipped: list[StoredCheckpoint] = []
    for candidate in stored:
        refuse_newer(candidate)
        problem = candidate.problem or find_damage(candidate.path)
        if problem is None:
            return candidate, skipped
        skipped.append(replace(candidate, problem=problem))
        skip(skipped[-1])
    if skipped:
        raise _none_usable(skipped)
    return None, []


def refuse_newer(stored: StoredCheckpoint) -> None:
    """Raise NewerFormatError if the problem of a checkpoint is that it is newer than we are."""
    if stored.newer_format:
        raise NewerFormatError(f"{stored.path}: {stored.problem}")


def _none_usable(skipped: Sequence[StoredCheckpoint]) -> CheckpointError:
    """The error for a folder that has checkpoints, all of them damaged."""
    lines = "\n".join(f"  - {stored}" for stored in skipped)
    return CheckpointError(
        f"{skipped[0].path.parent} has checkpoints, and none can be used:\n{lines}\n"
        "Starting from step 0 would hide that. To fix: restore one of them, or move the folder "
        "away to start afresh."
    )


def describe_skipped(skipped: Sequence[StoredCheckpoint], used: StoredCheckpoint) -> list[str]:
    """One sentence for each checkpoint that was passed over."""
    return [f"{stored}; used instead: {used.path.name}" for stored in skipped]


# Removing ----------------------------------------------------------------------------------------


def clean(folder: Path) -> list[Path]:
    """What dead attempts left half-written or half-deleted, removed.

    Only for the attempt that owns the run: another one may be writing there.
    """
    if not folder.is_dir():
        return []
    left = [
        path
        for path in folder.iterdir()
        if _TEMPORARY.fullmatch(path.name) or path.name.startswith(_PRUNED_PREFIX)
    ]
    for path in left:
        shutil.rmtree(path)
    return left


def prune(folder: Path, keep_last: int, *, verified: int | None = None) -> list[int]:
    """The steps that were deleted, so that the `keep_last` newest usable ones are left.

    Nothing is deleted unless the newest checkpoint is whole: its checksums are compared here, or
    `verified` is the step for which that has just been done.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1: {keep_last}")
    stored = list_checkpoints(folder)
    if not stored or stored[0].problem is not None:
        return []
    usable = [checkpoint for checkpoint in stored if checkpoint.problem is None]
    if len(usable) <= keep_last:
        return []
    if stored[0].step != verified and find_damage(stored[0].path) is not None:
        return []
    oldest_kept = usable[keep_last - 1].step
    doomed = [checkpoint for checkpoint in stored if checkpoint.step < oldest_kept]
    for checkpoint in doomed:
        # The name goes first: a crash in the middle of the deletion must not leave half a
        # checkpoint under a committed name.
        hidden = checkpoint.path.with_name(_PRUNED_PREFIX + checkpoint.path.name)
        shutil.rmtree(hidden, ignore_errors=True)
        checkpoint.path.rename(hidden)
        shutil.rmtree(hidden)
    return [checkpoint.step for checkpoint in doomed]


def _size_problem(path: Path, record: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}; expected {record.size_bytes} bytes"
    if size != record.size_bytes:
        return f"{path.name} has {size} bytes, expected {record.size_bytes}"
    return None


def _checksum_problem(path: Path, record: FileRecord) -> str | None:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(_READ_BYTES)
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    if digest.hexdigest() != record.sha256:
        return f"{path.name} has sha256 {digest.hexdigest()}, expected {record.sha256}"
    return None
