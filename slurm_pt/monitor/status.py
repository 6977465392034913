"""One row for each run: its state from Slurm and its folder, its progress from its heartbeats."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_pt.errors import RunFolderError
from slurm_pt.files import find_json, read_json
from slurm_pt.run_dir import AttemptDir, RunDir, resolve_places
from slurm_pt.submit.run_state import RunPhase, RunState, run_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from slurm_pt.submit.slurm import JobView, SlurmClient


@dataclass(frozen=True)
class RunStatus:
    """What there is to know about a run at a glance. None: not known, which is not 0."""

    run: RunDir
    state: RunState
    attempt: int | None
    step: int | None
    steps: int | None
    loss: float | None
    tokens_per_s: float | None
    phase: str | None
    """What rank 0 is doing."""
    heartbeat_age_s: float | None
    overrides: tuple[str, ...] = ()
    """What was set on the command line."""
    last_end: str = ""
    """How the attempt before the one under way ended."""

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run.name,
            "path": str(self.run.path),
            "overrides": list(self.overrides),
            "state": self.state.phase.value,
            "reason": self.state.reason,
            "job": self.state.job_key,
            "slurm_state": self.state.slurm_state,
            "attempt": self.attempt,
            "step": self.step,
            "steps": self.steps,
            "loss": self.loss,
            "tokens_per_s": self.tokens_per_s,
            "phase": self.phase,
            "heartbeat_age_s": self.heartbeat_age_s,
        }


def with_accounting(
    runs: Sequence[RunDir], jobs: Mapping[str, JobView], client: SlurmClient
) -> Mapping[str, JobView]:
    """Squeue's answer and, for runs whose job it has forgotten, what the accounting says."""
    states = [run_state(run, jobs) for run in runs]
    forgotten = [state.job_key for state in states if state.is_forgotten and state.job_key]
    return {**client.query_ended(forgotten), **jobs} if forgotten else jobs


def read_status(run: RunDir, jobs: Mapping[str, JobView] | None) -> RunStatus:
    """The row of a run; `jobs` is Slurm's answer (None: it gave none, the figures stay)."""
    state = run_state(run, jobs)
    try:
        beat: dict[str, Any] = find_json(run.heartbeats / "rank_00000.json") or {}
    except RunFolderError:
        beat = {}
    attempts = run.list_attempts()
    running = state.phase in {RunPhase.running, RunPhase.unknown}
    age_s = round(time.time() - beat["time"], 1) if "time" in beat and running else None
    step, loss = beat.get("step"), beat.get("loss")
    return RunStatus(
        run=run,
        state=state,
        attempt=attempts[-1].number if attempts else None,
        step=step,
        steps=beat.get("steps"),
        loss=loss,
        tokens_per_s=beat.get("tokens_per_s") if running else None,
        phase=beat.get("phase") if running else None,
        heartbeat_age_s=age_s,
        overrides=_overrides(run),
        last_end=_last_end(attempts),
    )


def _last_end(attempts: Sequence[AttemptDir]) -> str:
    for attempt in reversed(attempts):
        end = find_json(attempt.end)
        if end is not None:
            return str(end["reason"])
    return ""


def _overrides(run: RunDir) -> tuple[str, ...]:
    try:
        return tuple(read_json(run.spec)["overrides"])
    except (RunFolderError, KeyError):
        return ()


def find_runs(places: Iterable[Path]) -> list[RunDir]:
    """The runs at or directly below each place, in the order of their names."""
    runs: dict[Path, RunDir] = {}
    for place in [found for named in places for found in resolve_places(named)]:
        if (place / "config.yaml").is_file():
            runs[place] = RunDir(place)
        elif manifests := _manifests(place):  # a sweep's folder
            for manifest in manifests:
                for line in manifest.read_text(encoding="utf-8").splitlines():
                    runs[Path(line)] = RunDir(Path(line))
        elif place.is_dir():
            for config in sorted(place.glob("*/config.yaml")):
                runs[config.parent] = RunDir(config.parent)
        else:
            raise RunFolderError(
                f"{place}: there is no such folder. Name a run, a sweep's folder, or the run_root"
            )
    return list(runs.values())


def _manifests(sweep: Path) -> list[Path]:
    """The lists of a sweep's runs: one, or one for each group that asked for something else."""
    return [*sweep.glob("runs.txt"), *sorted(sweep.glob("group_*/runs.txt"))]
