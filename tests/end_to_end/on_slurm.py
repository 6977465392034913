"""What a user types, against a development cluster, with deadlines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_pt.devcluster import DevCluster, wait_until
from slurm_pt.files import find_json
from slurm_pt.monitor.history import first_difference, read_history
from slurm_pt.monitor.status import find_runs
from slurm_pt.run_dir import RunDir

REPOSITORY = Path(__file__).parents[2]
TRAIN = REPOSITORY / "train.py"
DEADLINE_S = 300.0

SMALL = (
    "model.num_layers=4",
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.max_seq_len=32",
    "train.seq_len=32",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.warmup_steps=0",
    "cluster.device=cpu",
    "monitor.heartbeat_s=0",
    "monitor.comment_s=2",
    "monitor.poll_s=2",
)
"""A model that steps in tens of milliseconds, with heartbeats at every step."""


@dataclass(frozen=True)
class Answer:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class User:
    """Somebody with a shell on the login node of a development cluster (or without any Slurm).

    With `corpora` the runs find the default corpus where another user's runs have made it.
    """

    def __init__(self, folder: Path, cluster: DevCluster | None, *, corpora: Path | None = None):
        self.folder = folder
        self.cluster = cluster
        self.corpora = corpora
        base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        base |= {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder)}
        base["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{base['PATH']}"
        self.environ = cluster.environment(base) if cluster is not None else base
        if cluster is None:
            self.environ.pop("SLURM_CONF", None)
        self.root = folder / "runs"
        if corpora is not None:
            self.root.mkdir(parents=True)
            (self.root / "data").symlink_to(corpora)

    def without_slurm(self) -> User:
        """Somebody who gives the same commands where there is no Slurm, for the same results."""
        folder = self.folder / "undisturbed"
        folder.mkdir()
        return User(folder, None, corpora=self.corpora)

    # ----------------------------------------------------------------------------- commands

    def types(self, *command: str, timeout_s: float = DEADLINE_S) -> Answer:
        """Runs a command to its end."""
        answer = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Answer(answer.returncode, answer.stdout, answer.stderr)

    def starts(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command in a session of its own, so that signals reach it alone."""
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def train(self, *overrides: str, program: Path = TRAIN) -> tuple[str, ...]:
        """The command line of a program with these overrides."""
        return (sys.executable, str(program), *overrides)

    def sweep(self, *overrides: str, program: Path = TRAIN, wait: bool = False) -> tuple[str, ...]:
        options = ["-m", "hydra/launcher=slurm_pt", f"hydra.launcher.wait={str(wait).lower()}"]
        return self.train(*options, f"run_root={self.root}", *overrides, program=program)

    def submits(self, *overrides: str, program: Path = TRAIN) -> list[RunDir]:
        """Submits a sweep and returns at once; the runs, new and old."""
        answer = self.types(*self.sweep(*overrides, program=program))
        assert answer.code == 0, answer.text
        return find_runs([self.root])

    def status(self, *places: Path) -> list[dict[str, Any]]:
        paths = [str(place) for place in places or (self.root,)]
        answer = self.types("slurm-pt", "status", "--json", "--max-age", "0", *paths)
        assert answer.code == 0, answer.text
        rows: list[dict[str, Any]] = json.loads(answer.out)
        return rows

    def takes_nodes(self, *, nodes: int, seconds: float = 1) -> str:
        """Submits a job of high priority that needs whole nodes; its id."""
        wrap = f"sleep {seconds}"
        options = ["--parsable", "-J", "urgent", "-q", "high", "--exclusive", "-o", "/dev/null"]
        answer = self.types("sbatch", *options, f"-N{nodes}", "--wrap", wrap)
        assert answer.code == 0, answer.text
        return answer.out.strip()

    # ---------------------------------------------------------------------------- waiting

    def waits_for(
        self, condition: Callable[[], bool], what: str, runs: Sequence[RunDir] = ()
    ) -> None:
        if not wait_until(condition, timeout_s=DEADLINE_S, poll_s=0.1):
            raise AssertionError(f"no {what} in {DEADLINE_S:.0f} s\n" + "\n".join(map(tell, runs)))

    def waits_for_step(self, run: RunDir, step: int, *, attempt: int | None = None) -> None:
        def reached() -> bool:
            beat = find_json(run.heartbeats / "rank_00000.json") or {}
            right = attempt is None or beat.get("attempt") == attempt
            return run.done.exists() or (right and beat.get("step", 0) >= step)

        self.waits_for(reached, f"step {step} of attempt {attempt}", [run])
        assert not run.done.exists(), f"the run ended before step {step}\n{tell(run)}"

    def waits_for_end(self, *runs: RunDir) -> None:
        """Until each run is finished, or was given up."""
        self.waits_for(lambda: all(is_over(run) for run in runs), "end", runs)
        for run in runs:
            assert run.done.exists(), tell(run)


def is_over(run: RunDir) -> bool:
    """Nothing of it runs any more: done.json is there while the last ranks are still leaving."""
    attempts = run.list_attempts()
    end = find_json(attempts[-1].end) if attempts else None
    return end is not None and end["action"] != "requeue"


def tell(run: RunDir) -> str:
    """A run's story, for a failed test."""
    story = [f"== {run.path}"]
    story += [json.dumps(event) for event in run.read_events()]
    for attempt in run.list_attempts()[-2:]:
        for log in [attempt.srun_log, *sorted(attempt.logs.glob("*"))[:8]]:
            if log.exists() and (text := log.read_text(errors="replace").strip()):
                story.append(f"-- {log.parent.parent.name}/{log.name}\n{text[-1500:]}")
    for out in run.path.parent.glob("sweeps/*/slurm-*.out"):
        story.append(f"-- {out.name}\n{out.read_text(errors='replace')[-800:]}")
    return "\n".join(story)


def kill_rank(run: RunDir, rank: int) -> None:
    """kill -9 of one rank of a running run; every node of the cluster is this machine."""
    beat = find_json(run.heartbeats / f"rank_{rank:05d}.json")
    assert beat is not None
    os.kill(beat["pid"], signal.SIGKILL)


def assert_same_losses(run: RunDir, reference: RunDir, *, up_to: int | None = None) -> None:
    """Bit for bit, over all steps or the first `up_to`."""
    difference = first_difference(run, reference, up_to=up_to)
    assert difference is None, f"{difference}\n{tell(run)}"


def history(run: RunDir) -> Any:
    return read_history(run)
