"""The whole promise on one machine: a sweep is preempted by a real Slurm and comes back exactly.

A sweep of two runs, each split 2 x 2 x 2 over four nodes, trains at low priority; a job of high
priority takes the nodes; the runs commit, are requeued, resume and finish. Then the same sweep runs
undisturbed, and the two are compared bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from slurm_pt.devcluster import DevCluster, DevClusterConfig, install_packages, missing_packages
from slurm_pt.devcluster.deadlines import wait_until
from slurm_pt.errors import DevClusterError, SlurmPtError
from slurm_pt.files import find_json, read_json
from slurm_pt.monitor.history import first_difference, read_history
from slurm_pt.monitor.status import find_runs
from slurm_pt.run_dir import RunDir

STEPS = 60
SWEEP = (
    "train.lr=1e-3,3e-4",
    f"train.steps={STEPS}",
    "parallel.tp=2",
    "parallel.pp=2",
    "parallel.dp=2",
    "cluster.device=cpu",
    "monitor.heartbeat_s=1",
    "monitor.comment_s=5",
    "monitor.poll_s=3",
)
ON_SLURM = ("slurm.nodes=4", "slurm.partition=main", "slurm.cpus_per_task=1", "slurm.time='30'")
DEADLINE_S = 420.0


class DemoError(SlurmPtError):
    """The demonstration did not go as promised."""

    exit_code = 1


def run_demo(*, folder: Path | None, keep: bool) -> int:
    """Runs the demonstration; 0 if everything it promises came true."""
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    place = folder or Path(tempfile.mkdtemp(prefix="slurm-pt-demo-"))
    cluster = _cluster(console, place)
    try:
        environ = dict(os.environ) if cluster is None else cluster.environment()
        environ |= {"OMP_NUM_THREADS": "1"}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        demo = _Demo(console, place, environ, cluster)
        good = demo.on_slurm() if cluster is not None else demo.locally()
    finally:
        if cluster is not None and not keep:
            cluster.down()
    console.print(f"Done in {time.monotonic() - began:.0f} s. The runs are in {place}")
    return 0 if good else 1


def _cluster(console: Console, place: Path) -> DevCluster | None:
    try:
        if missing_packages():
            console.print("Installing Slurm from Debian's packages ...")
            install_packages()
        cluster = DevCluster(place / "cluster")
        console.print("Starting a Slurm of four nodes on this machine ...")
        cluster.up(DevClusterConfig(nodes=4, grace_time_s=30))
    except DevClusterError as error:
        console.print(f"[bold]Left out: a real Slurm.[/bold] {error}")
        console.print("The runs start as local processes, and a signal stands for the preemption.")
        return None
    return cluster


class _Demo:
    """The acts of the play."""

    def __init__(
        self, console: Console, place: Path, environ: Mapping[str, str], cluster: DevCluster | None
    ):
        self.console, self.place, self.environ, self.cluster = console, place, environ, cluster

    def on_slurm(self) -> bool:
        root, reference = self.place / "runs", self.place / "undisturbed"
        self._submit(root, *ON_SLURM, "slurm.qos=low")
        runs = find_runs([root])
        self._wait_for(lambda: all(_step(run) >= 5 for run in runs), "both runs to train")
        self._show(["squeue", "-o", "%.8i %.10q %.10T %.6D %k"])
        self.console.print("\nA job of high priority takes all nodes:")
        command = ["sbatch", "-J", "urgent", "-q", "high", "-N4", "--exclusive", "-o", "/dev/null"]
        self._show([*command, "--wrap", "sleep 2"])
        self._wait_for(lambda: all(_ended(run, 0) for run in runs), "the runs to commit and leave")
        self._show(["squeue", "-o", "%.8i %.10q %.10T %.6D %r"])
        self._wait_for(lambda: all(run.done.exists() for run in runs), "both runs to finish")
        self._wait_for(lambda: not self._waiting_or_running(), "Slurm to let go of them")
        self._show(["slurm-pt", "status", str(root)])
        self.console.print("\nThe same sweep, undisturbed:")
        self._submit(reference, *ON_SLURM, "slurm.qos=high")
        undisturbed = find_runs([reference])
        self._wait_for(lambda: all(run.done.exists() for run in undisturbed), "them to finish")
        return self._compare(runs, undisturbed, must_be_preempted=True)

    def locally(self) -> bool:
        root, reference = self.place / "runs", self.place / "undisturbed"
        self._submit(root, "slurm.array_parallelism=2")
        runs = find_runs([root])
        self._wait_for(lambda: all(_step(run) >= 5 for run in runs), "both runs to train")
        self.console.print("\nA stop signal to one rank of each run:")
        for run in runs:
            beat = read_json(run.heartbeats / "rank_00003.json")
            os.kill(beat["pid"], 15)
        self._wait_for(lambda: all(run.done.exists() for run in runs), "both runs to finish")
        self._submit(reference, "slurm.array_parallelism=2")
        undisturbed = find_runs([reference])
        self._wait_for(lambda: all(run.done.exists() for run in undisturbed), "them to finish")
        return self._compare(runs, undisturbed, must_be_preempted=False)

    def _submit(self, root: Path, *overrides: str) -> None:
        program = Path(__file__).parent / "demo_program.py"
        command = [sys.executable, str(program), "-m", "hydra/launcher=slurm_pt"]
        command += ["hydra.launcher.wait=false", f"run_root={root}", *SWEEP, *overrides]
        self._show(command, shown=["python", "train.py", *command[2:]])

    def _show(self, command: Sequence[str], *, shown: Sequence[str] | None = None) -> None:
        self.console.print(f"[bold]$ {' '.join(shown or command)}[/bold]", markup=True)
        answer = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=120, check=False
        )
        self.console.print((answer.stdout + answer.stderr).rstrip(), markup=False)
        if answer.returncode != 0:
            raise DemoError(f"{command[0]} ended with {answer.returncode}")

    def _waiting_or_running(self) -> str:
        command = ["squeue", "-h", "-o", "%i"]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        with self.console.status(f"waiting for {what} ..."):
            came = wait_until(condition, timeout_s=DEADLINE_S, poll_s=0.2)
        if not came:
            raise DemoError(f"waited {DEADLINE_S:.0f} s in vain for {what}; see {self.place}")
        self.console.print(f"  ({time.monotonic() - began:.0f} s for {what})")

    def _compare(
        self, runs: Sequence[RunDir], undisturbed: Sequence[RunDir], *, must_be_preempted: bool
    ) -> bool:
        good, preempted = True, 0
        for run, other in zip(runs, undisturbed, strict=True):
            history = read_history(run)
            difference = first_difference(run, other)
            preempted += "preempted" in history.outcomes
            commits = ", ".join(f"{seconds:.1f}" for seconds in history.signal_to_commit_s)
            self.console.print(
                f"\n{run.name}\n"
                f"  attempts: {history.attempts} ({', '.join(history.outcomes)})\n"
                f"  steps lost: {history.steps_lost}\n"
                f"  seconds from signal to commit: {commits or 'no signal'}\n"
                "  same losses as the uninterrupted run: "
                + ("yes" if difference is None else f"NO: {difference}")
            )
            good = good and difference is None and history.steps_lost == 0
        if must_be_preempted and not preempted:
            self.console.print("No run was preempted.")
            return False
        return good


def _step(run: RunDir) -> int:
    beat = find_json(run.heartbeats / "rank_00000.json")
    return int(beat["step"]) if beat else 0


def _ended(run: RunDir, attempt: int) -> bool:
    return run.attempt(attempt).end.exists()
