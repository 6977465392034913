from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from slurm_pt.devcluster import DevCluster, wait_until
from slurm_pt.submit.slurm import SlurmClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Runs until KILL or scancel's end; TERM and USR2 reach the ranks and are passed over, as while
# ours save. Asks for little, so that many fit.
STUBBORN = """#!/bin/bash
trap : TERM
srun --overlap bash -c 'trap : TERM USR2; touch up-$SLURM_JOB_ID; while true; do sleep 0.1; done'
sleep 60
"""


@dataclass
class Bench:
    """Submits jobs to a real cluster and cancels them all at the end."""

    cluster: DevCluster
    folder: Path
    client: SlurmClient
    jobs: list[str] = field(default_factory=list)

    def submit(self, script: str, *options: str, **variables: str) -> str:
        """A job's id; `variables` are added to sbatch's environment."""
        path = self.folder / f"job-{len(self.jobs)}.sbatch"
        path.write_text(script)
        command = ["sbatch", "--parsable", "--mem=50", *options, str(path)]
        ran = self.cluster.run(command, cwd=self.folder, variables=variables)
        return self.note(ran.stdout.strip())

    def note(self, job: str) -> str:
        self.jobs.append(job)
        return job

    def ask(self, job: str, fields: str) -> str:
        """What squeue says of a job, which it must know."""
        command = ["squeue", "-h", "-t", "all", "-j", job, "-o", fields]
        return self.cluster.run(command).stdout.removesuffix("\n")

    def wait_for(self, job: str, *states: str, timeout_s: float = 90) -> None:
        assert wait_until(lambda: self.ask(job, "%T") in states, timeout_s=timeout_s, poll_s=0.1), (
            f"job {job} is {self.ask(job, '%T %r')} and not {states}"
        )

    def start_stubborn(self, *options: str) -> str:
        """A running job whose rank has set its traps."""
        job = self.submit(STUBBORN, *options)
        self.wait_for(job, "RUNNING")
        assert wait_until(lambda: (self.folder / f"up-{job}").exists(), timeout_s=60)
        return job

    def cancel_all(self) -> None:
        if self.jobs:
            subprocess.run(
                ["scancel", *self.jobs], env=self.cluster.environment(), check=False, timeout=60
            )


def make_bench(cluster: DevCluster, folder: Path) -> Bench:
    return Bench(cluster, folder, SlurmClient(cluster.environment()))


@pytest.fixture
def bench(devcluster: DevCluster, tmp_path: Path) -> Iterator[Bench]:
    bench = make_bench(devcluster, tmp_path)
    yield bench
    bench.cancel_all()
