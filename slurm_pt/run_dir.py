"""The run folder: the name and shape of every file of a run, and how they are written.

Only these files pass from the login node to the ranks and back. Everything is text that a person
can read, written aside and renamed, so a reader sees the old file or the new one, never a half.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf

from slurm_pt.config import JobConfig, plain_config, signature
from slurm_pt.errors import ConfigError, DiskError, Problem, RunFolderError

if TYPE_CHECKING:
    from collections.abc import Iterator


_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}

DEFAULT_ROOT = "runs"
"""Where run_root points by default, from the folder that one works in."""


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


@dataclass(frozen=True)
class AttemptDir:
    """The files of one start of a run."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def begin(self) -> Path:
        """Who began it, when, on which nodes."""
        return self.path / "begin.json"

    @property
    def end(self) -> Path:
        """What was decided after it."""
        return self.path / "end.json"

    @property
    def exits(self) -> Path:
        return self.path / "exits"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def exit_record(self, rank: int) -> Path:
        return self.exits / f"rank_{rank:05d}.json"

    def rank_log(self, rank: int) -> Path:
        """What a rank printed. srun's pattern for it is rank_%t.log."""
        return self.logs / f"rank_{rank}.log"

    @property
    def srun_log(self) -> Path:
        """What srun itself said, apart from what the ranks printed."""
        return self.path / "srun.log"


@dataclass(frozen=True)
class RunDir:
    """The files of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def spec(self) -> Path:
        """What to start: the program, and how it was asked for."""
        return self.path / "spec.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def job(self) -> Path:
        """The Slurm job that was submitted for this run."""
        return self.path / "job.json"

    @property
    def owner(self) -> Path:
        return self.path / "owner.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeat"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def done(self) -> Path:
        return self.path / "done.json"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / str(number))

    def list_attempts(self) -> list[AttemptDir]:
        """All attempts, oldest first."""
        try:
            names = [entry.name for entry in self.attempts.iterdir() if entry.name.isdecimal()]
        except FileNotFoundError:
            return []
        return [self.attempt(number) for number in sorted(int(name) for name in names)]

    def new_attempt(self) -> AttemptDir:
        """A folder for the next attempt. Made exclusively: two starters never share one."""
        number = max((attempt.number for attempt in self.list_attempts()), default=-1) + 1
        while True:
            attempt = self.attempt(number)
            try:
                attempt.path.mkdir()
                break
            except FileExistsError:
                number += 1
        attempt.exits.mkdir()
        attempt.logs.mkdir()
        return attempt

    def read_config(self) -> DictConfig:
        """The configuration that the run was made with. Raises RunFolderError."""
        try:
            cfg = OmegaConf.load(self.config)
        except (OSError, yaml.YAMLError) as error:
            raise RunFolderError(f"{self.config} cannot be read: {error}") from error
        if not isinstance(cfg, DictConfig):
            raise RunFolderError(f"{self.config} does not hold a configuration")
        return cfg

    def committed_step(self) -> int:
        """The newest step whose checkpoint was committed, by looking at the names; 0 for none."""
        steps = [
            int(manifest.parent.name.removeprefix("step_"))
            for manifest in self.checkpoints.glob("step_*/manifest.json")
            if manifest.parent.name.removeprefix("step_").isdecimal()
        ]
        return max(steps, default=0)

    def record_event(self, kind: str, **fields: Any) -> None:
        """Adds one line to events.jsonl: time (Unix seconds), kind, and what belongs to it."""
        append_json_line(self.events, {"time": round(time.time(), 3), "event": kind, **fields})

    def read_events(self, kind: str | None = None) -> list[dict[str, Any]]:
        events = read_json_lines(self.events)
        return [event for event in events if kind is None or event.get("event") == kind]

    def read_metrics(self) -> dict[int, dict[str, Any]]:
        """The last record of every step. Steps repeated after a crash appear once."""
        return {m["step"]: m for m in read_json_lines(self.metrics) if "step" in m}


def run_dir_of(config: JobConfig, cfg: Any) -> RunDir:
    """The folder of a configuration: `<run_root>/<name>-<signature>`. Nothing is created."""
    root = Path(config.run_root).expanduser().absolute()
    if "\\" in str(root) or not str(root).isprintable():
        rule = "Slurm cannot write logs into a folder with a backslash or a line feed in its name"
        raise ConfigError([Problem("run_root", repr(str(root)), rule, "set another run_root")])
    return RunDir(root / f"{config.name}-{signature(cfg)}")


def make_folders(run: RunDir) -> None:
    """Makes the run folder and those in it. Raises RunFolderError where that cannot be."""
    try:
        for folder in (run.path, run.attempts, run.heartbeats, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"run_root={run.path.parent}: {error.filename} cannot be made: {error.strerror}. Set "
            "run_root to a folder that you can write, on a file system that all nodes share"
        ) from error


def create_run(run: RunDir, *, cfg: Any, spec: dict[str, Any], plan: dict[str, Any]) -> None:
    """Makes the folder and its inputs, or brings those of an existing one up to date.

    The inputs stay for the life of the run: a requeued job reads them again.
    """
    make_folders(run)
    write_text(run.config, OmegaConf.to_yaml(OmegaConf.create(plain_config(cfg))))
    write_json(run.spec, spec)
    write_json(run.plan, plan)


def open_run(path: Path | str) -> RunDir:
    """An existing run folder. Raises RunFolderError where there is none."""
    run = RunDir(resolve_place(Path(path)))
    if not run.config.is_file():
        raise RunFolderError(
            f"{path} is not a run folder (it has no config.yaml), nor the name of a run in "
            f"./{DEFAULT_ROOT}. `slurm-pt status` lists the runs"
        )
    return run


def resolve_place(place: Path) -> Path:
    """The absolute path of a folder, or of the run in ./runs whose name begins with this word."""
    path = place.expanduser().absolute()
    if path.exists() or len(place.parts) != 1:
        return path
    named = [found.parent for found in Path(DEFAULT_ROOT).glob(f"{place.name}*/config.yaml")]
    exact = [found for found in named if found.name == place.name]
    chosen = exact or named
    return chosen[0].absolute() if len(chosen) == 1 else path
