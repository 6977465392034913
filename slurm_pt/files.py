"""Files that are whole at any moment: written aside and renamed, or one line at a time.

Everything is text that a person can read. A reader sees the old file or the new one, never a half.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from typing import TYPE_CHECKING, Any

from slurm_pt.errors import DiskError, RunFolderError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replaces a file in one step, durably: temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        kind = DiskError if error.errno in _DISK_ERRORS else RunFolderError
        raise kind(
            f"{path} cannot be written: {error.strerror}. Free some space or correct the folder's "
            "permissions, or set run_root to a folder that you can write"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Makes a rename in a folder durable, where the file system knows how."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, record: Any, *, mode: int = 0o666) -> None:
    """Replaces a JSON file in one step."""
    write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n", mode=mode)


def find_json(path: Path) -> Any | None:
    """The content of a JSON file; None where there is no file. Raises RunFolderError if damaged."""
    try:
        return read_json(path)
    except MissingFileError:
        return None


class MissingFileError(RunFolderError):
    """A file that the run folder must have is not there."""


def read_json(path: Path) -> Any:
    """The content of a JSON file that must be there. Raises RunFolderError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(
            f"{path} is missing. A job's inputs stay until it ends: was a part of the run folder "
            "removed? Submit the run again"
        ) from None
    except (ValueError, OSError) as error:
        raise RunFolderError(
            f"{path} cannot be read ({error}). It is written in one step, so this is a damaged "
            "disk or an edit by hand: correct or remove the file"
        ) from error


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Adds one line to a log of JSON records. One write call: lines of two writers never mix."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = "\n" + line  # a full disk cut off the last line: lose that one only
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of such a log; a line cut off by a full disk or a kill is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.split("\n"):  # splitlines would also split at what JSON leaves as it is
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record
