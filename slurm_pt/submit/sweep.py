"""From the points of a sweep to as few jobs as possible, each run at most once."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_pt.errors import ConfigError, Problem, RunFolderError, SubmitError
from slurm_pt.files import write_json
from slurm_pt.owner import pid_start_time
from slurm_pt.run_dir import RunDir
from slurm_pt.run_inputs import create_run
from slurm_pt.submit.executor import LocalRunExecutor, SlurmRunExecutor, train_run
from slurm_pt.submit.run_state import RunPhase, RunState, run_state
from slurm_pt.submit.script import JobSpec, make_job_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from slurm_pt.config import JobConfig
    from slurm_pt.plan import Plan
    from slurm_pt.submit.slurm import JobView, SlurmClient


@dataclass(frozen=True)
class Point:
    """One run of a sweep, checked and planned, not yet on disk."""

    run: RunDir
    cfg: Any
    """The composed configuration (OmegaConf)."""
    config: JobConfig
    plan: Plan
    spec: dict[str, Any]


@dataclass(frozen=True)
class Submitted:
    """What became of a sweep's points, in their order."""

    folder: Path | None
    """Scripts and logs of what was submitted; None: nothing had to be."""
    new: tuple[RunDir, ...]
    already: tuple[tuple[RunDir, RunState], ...]


def check_points(points: Sequence[Point]) -> None:
    """Raises ConfigError if two points are one run: they would write the same folder."""
    seen: dict[Path, int] = {}
    for number, point in enumerate(points):
        first = seen.setdefault(point.run.path, number)
        if first != number:
            rule = f"points {first} and {number} of the sweep are the same run ({point.run.name})"
            fix = (
                "sweep over a key that changes the result, or give them different values of `name`"
            )
            raise ConfigError([Problem("sweep", point.run.name, rule, fix)])


def submit_points(
    points: Sequence[Point], *, client: SlurmClient | None, jobs: Mapping[str, JobView] | None
) -> Submitted:
    """Submits every point that is not finished and not on its way; through Slurm, or locally.

    `jobs` is what Slurm knows now (None: it gave no answer); `client` None means local processes.
    """
    check_points(points)
    states = [(point, run_state(point.run, jobs)) for point in points]
    new = [point for point, state in states if _is_due(state)]
    already = tuple((point.run, state) for point, state in states if not _is_due(state))
    if not new:
        return Submitted(None, (), already)
    fresh = [point.run for point in new if not point.run.path.exists()]
    for point in new:
        create_run(point.run, cfg=point.cfg, spec=point.spec, plan=point.plan.as_json())
    folder = _sweep_folder(new)
    try:
        if client is None:
            _submit_locally(folder, new)
        else:
            _submit_to_slurm(folder, new, client)
    except SubmitError:
        _remove_what_was_not_submitted(fresh, folder)
        raise
    return Submitted(folder, tuple(point.run for point in new), already)


def _remove_what_was_not_submitted(fresh: Sequence[RunDir], folder: Path) -> None:
    """After a refusal: folders that were made for nothing would be shown as runs for ever."""
    for run in fresh:
        if not run.job.exists() and not run.list_attempts():
            shutil.rmtree(run.path, ignore_errors=True)
    if not any(run.job.exists() for run in fresh):
        shutil.rmtree(folder, ignore_errors=True)


def _is_due(state: RunState) -> bool:
    return not state.phase.is_alive and state.phase is not RunPhase.finished


def _sweep_folder(points: Sequence[Point]) -> Path:
    """A new folder for scripts and logs; made exclusively, whatever the clock says."""
    names = "".join(sorted(point.run.name for point in points))
    digest = hashlib.sha256(names.encode()).hexdigest()[:6]
    root = points[0].run.path.parent / "sweeps"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in range(1000):
            folder = root / (f"{stamp}-{digest}" + (f"-{number}" if number else ""))
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise RunFolderError(
            f"run_root={root.parent}: {error.strerror}; set another run_root"
        ) from error
    raise RunFolderError(f"{root} holds a thousand sweeps of this very second")


def _submit_to_slurm(folder: Path, points: Sequence[Point], client: SlurmClient) -> None:
    groups: dict[JobSpec, list[Point]] = {}
    for point in points:
        groups.setdefault(make_job_spec(point.config, point.plan), []).append(point)
    executors = []
    for number, (spec, members) in enumerate(groups.items()):
        part = folder / f"group_{number}" if len(groups) > 1 else folder
        executors.append((SlurmRunExecutor(part, spec=spec, client=client), members))
    if len(executors) > 1:  # find out about every refusal before the first job is in
        for executor, members in executors:
            script = executor.write_script([point.run.path for point in members])
            client.submit_test(script)
    submitted: list[str] = []
    for executor, members in executors:
        asked_at = time.time()  # decisions before this belong to an earlier job
        try:
            jobs = executor.map_array(train_run, [point.run.path for point in members])
        except SubmitError as error:
            if not submitted:
                raise
            raise SubmitError(f"{error}\nSubmitted before that: {', '.join(submitted)}") from error
        for point, job in zip(members, jobs, strict=True):
            submitted.append(job.job_id)
            record = {
                "job_key": job.job_id,
                "submitted": asked_at,
                "folder": str(executor.folder),
            }
            write_json(point.run.job, record)
            point.run.record_event("submitted", job_key=job.job_id)


def _submit_locally(folder: Path, points: Sequence[Point]) -> None:
    parallelism = points[0].config.slurm.array_parallelism or 1
    executor = LocalRunExecutor(folder, parallelism=parallelism)
    asked_at = time.time()
    jobs = executor.map_array(train_run, [point.run.path for point in points])
    for point, job in zip(points, jobs, strict=True):
        pid = int(job.job_id)
        record = {"pid": pid, "pid_start": pid_start_time(pid), "submitted": asked_at}
        write_json(point.run.job, {**record, "folder": str(folder), "host": os.uname().nodename})
        point.run.record_event("submitted", pid=pid)
