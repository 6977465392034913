"""submitit's executors with our batch script: a job is a run folder, not a pickled function."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from submitit.core.utils import DelayedSubmission, FailedJobError
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from slurm_pt.files import find_json
from slurm_pt.run_dir import RunDir
from slurm_pt.submit.environment import clean_environment
from slurm_pt.submit.script import JobSpec, render_script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from submitit.core.core import Job

    from slurm_pt.submit.slurm import SlurmClient


def train_run(run_path: Path) -> int:
    """What a submitted job does, as a function for `executor.submit`: one rank of one run."""
    return subprocess.call([sys.executable, "-u", "-m", "slurm_pt.worker", str(run_path)])


class _RunResult:
    """A job's result is the run's done.json: nothing is pickled, so nothing needs the same code."""

    run_path: Path

    def done(self, force_check: bool = False) -> bool:
        return self._outcome(force_check) is not None

    def result(self) -> Any:
        outcome = self._outcome(True)
        if outcome is None or "reason" in outcome:
            reason = outcome["reason"] if outcome else "it has not ended"
            raise FailedJobError(f"{self.run_path}: {reason}")
        return outcome

    def _outcome(self, _: bool) -> dict[str, Any] | None:
        run = RunDir(self.run_path)
        done: dict[str, Any] | None = find_json(run.done)
        if done is not None:
            return done
        attempts = run.list_attempts()
        end: dict[str, Any] | None = find_json(attempts[-1].end) if attempts else None
        return end if end is not None and end["action"] == "stop" else None


class SlurmRunJob(_RunResult, SlurmJob[Any]):
    """A run in the hands of Slurm."""


class LocalRunJob(_RunResult, LocalJob[Any]):
    """A run in the hands of a local launcher process."""

    def __del__(self) -> None:
        """The launcher goes on when the program that started it ends."""


def _run_paths(submissions: Sequence[DelayedSubmission]) -> tuple[Path, ...]:
    for submission in submissions:
        if submission.function is not train_run:
            raise TypeError("this executor starts run folders: submit(train_run, path)")
    return tuple(Path(submission.args[0]) for submission in submissions)


def _write_manifest(folder: Path, runs: Sequence[Path]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "runs.txt"
    manifest.write_text("".join(f"{run}\n" for run in runs), encoding="utf-8")
    return manifest


class SlurmRunExecutor(SlurmExecutor):
    """Submits runs that ask for the same as one sbatch: an array if there are several."""

    job_class = SlurmRunJob

    def __init__(self, folder: Path, *, spec: JobSpec, client: SlurmClient):
        super().__init__(folder)
        self._spec = spec
        self._client = client

    @classmethod
    def affinity(cls) -> int:
        return 2  # whether Slurm can be reached is the client's question, not PATH's

    def write_script(self, runs: Sequence[Path]) -> Path:
        """Writes the manifest and the batch script of these runs, ready for sbatch."""
        manifest = _write_manifest(self.folder, runs)
        pattern = "slurm-%A_%a.out" if len(runs) > 1 else "slurm-%j.out"
        log = self.folder / pattern
        script = self.folder / "job.sbatch"
        text = render_script(self._spec, tuple(runs), log=log, manifest=manifest)
        script.write_text(text, encoding="utf-8")
        return script

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[DelayedSubmission]
    ) -> list[Job[Any]]:
        runs = _run_paths(delayed_submissions)
        job_id = self._client.submit(self.write_script(runs))
        ids = [job_id] if len(runs) == 1 else [f"{job_id}_{index}" for index in range(len(runs))]
        jobs: list[Job[Any]] = []
        for key, run in zip(ids, runs, strict=True):
            job = SlurmRunJob(folder=self.folder, job_id=key, tasks=[0])
            job.run_path = run
            jobs.append(job)
        return jobs


class LocalRunExecutor(LocalExecutor):
    """Runs the same runs on this machine, a few at a time, without Slurm.

    One launcher process in a session of its own goes through the manifest, so that Ctrl-C and a
    closed terminal leave it alone.
    """

    job_class = LocalRunJob

    def __init__(self, folder: Path, *, parallelism: int = 1):
        super().__init__(folder)
        self._parallelism = parallelism

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[DelayedSubmission]
    ) -> list[Job[Any]]:
        runs = _run_paths(delayed_submissions)
        manifest = _write_manifest(self.folder, runs)
        command = [sys.executable, "-u", "-m", "slurm_pt.launch.local", str(manifest)]
        with (self.folder / "local.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--parallel", str(self._parallelism)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment(os.environ),
                start_new_session=True,
            )
        jobs: list[Job[Any]] = []
        for run in runs:
            job = LocalRunJob(
                folder=self.folder, job_id=str(process.pid), tasks=[0], process=process
            )
            job.run_path = run
            jobs.append(job)
        return jobs
