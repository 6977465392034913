"""One answer of squeue for all terminals of a user: a small file, used again while it is young."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_pt.errors import SubmitError
from slurm_pt.submit.slurm import JobView, SlurmClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class SqueueAnswer:
    """The user's jobs (None: no answer), and a line for people about how old it is or why not."""

    jobs: Mapping[str, JobView] | None
    note: str = ""


def ask_squeue(*, max_age_s: float) -> SqueueAnswer:
    """The user's jobs; asks the controller only if the last answer is older than `max_age_s`."""
    client = SlurmClient()
    if not client.is_available():
        # Not "no jobs": a run that was submitted elsewhere may well be running.
        return SqueueAnswer(
            None, "no Slurm here (is SLURM_CONF set?): only local runs have a state"
        )
    path = _cache_path()
    if path is None:
        return _ask(client)
    with _locked(path.with_suffix(".lock")):  # of many terminals one asks, the others read
        cached = _read(path, max_age_s)
        if cached is not None:
            return SqueueAnswer(cached)
        answer = _ask(client)
        if answer.jobs is not None:
            _write(path, answer.jobs)
    return answer


def _ask(client: SlurmClient) -> SqueueAnswer:
    try:
        return SqueueAnswer(client.query_my_jobs())
    except SubmitError as error:
        return SqueueAnswer(None, f"states unknown, figures as last written: {error}")


def _cache_path() -> Path | None:
    """Private to the user and to the cluster that SLURM_CONF names; None: there is no place."""
    cluster = hashlib.sha256(os.environ.get("SLURM_CONF", "").encode()).hexdigest()[:8]
    place = os.environ.get("XDG_RUNTIME_DIR")  # set, but not there, on nodes without a login
    shared = Path(tempfile.gettempdir()) / f"slurm_pt-{os.getuid()}"
    for folder in [Path(place), shared] if place else [shared]:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            # In the shared /tmp somebody else may have made it.
            if folder.lstat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                return folder / f"squeue-{cluster}.json"
    return None


def _read(path: Path, max_age_s: float) -> dict[str, JobView] | None:
    try:
        if time.time() - path.stat().st_mtime > max_age_s:
            return None
        records = json.loads(path.read_text(encoding="utf-8"))
        return {record["job_key"]: JobView(**record) for record in records}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, jobs: Mapping[str, JobView]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps([asdict(view) for view in jobs.values()]), encoding="utf-8")
        temporary.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
