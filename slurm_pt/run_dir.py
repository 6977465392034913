"""The run folder: the name and place of every file of a run.

Only these files pass from the login node to the ranks and back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_pt.errors import RunFolderError
from slurm_pt.files import append_json_line, read_json_lines

DEFAULT_ROOT = "runs"
"""Where run_root points by default, from the folder that one works in."""


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


def open_run(path: Path | str) -> RunDir:
    """An existing run folder, or the run in ./runs whose name begins with this word.

    Raises RunFolderError where there is none, or more than one.
    """
    found = resolve_places(Path(path))
    if len(found) > 1:
        shown = ", ".join(run.name for run in found[:5]) + (", ..." if len(found) > 5 else "")
        raise RunFolderError(f"{path} begins the names of {len(found)} runs: {shown}. Say more")
    run = RunDir(found[0])
    if not run.config.is_file():
        raise RunFolderError(
            f"{path} is not a run folder (it has no config.yaml), nor the name of a run in "
            f"./{DEFAULT_ROOT}. `slurm-pt status` lists the runs"
        )
    return run


def resolve_places(place: Path) -> list[Path]:
    """The absolute path of a folder, or of the runs in ./runs that a word means.

    The one of this name, or all whose names begin with it; the path itself where there are none.
    """
    path = place.expanduser().absolute()
    if path.exists() or len(place.parts) != 1:
        return [path]
    found = [run.parent.absolute() for run in Path(DEFAULT_ROOT).glob(f"{place.name}*/config.yaml")]
    return [run for run in found if run.name == place.name] or sorted(found) or [path]
