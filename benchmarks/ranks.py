"""Runs one trial on fresh gloo processes of this machine, with the interpreter it needs.

A launcher process imports the contestant once and forks the ranks: four ranks start in the time
of one. The first rank that fails decides, and the others are killed, by id. Ranks end with
os._exit, since gloo's threads abort some clean exits.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from benchmarks.contestants import contestant
from benchmarks.trial import Trial

REPOSITORY = Path(__file__).parent.parent


class TrialError(Exception):
    """A rank raised, died, or did not end in time."""


@dataclass(frozen=True)
class Outcome:
    """What the ranks of a trial measured."""

    losses: list[float]
    """The global batch's mean loss of every step, warm-up included."""
    step_s: float
    """The median timed step of the slowest rank; 0.0 if nothing was timed."""


def run_trial(trial: Trial, *, python: str = sys.executable, deadline_s: float = 600.0) -> Outcome:
    """Train once. Raises TrialError with the traceback of the first rank that failed."""
    with tempfile.TemporaryDirectory(prefix="trial-") as name:
        folder = Path(name)
        call = {"trial": trial.as_json(), "deadline_s": deadline_s}
        (folder / "call.json").write_text(json.dumps(call))
        with (folder / "output").open("wb") as output:
            launcher = subprocess.Popen(
                [python, "-m", "benchmarks.ranks", name],
                cwd=REPOSITORY,
                env=_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                launcher.wait(timeout=deadline_s + 60.0)
            finally:  # also when this process is told to stop
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)  # a session of our ranks alone
                    launcher.wait()
        return _outcome(folder, trial)


def _environment() -> dict[str, str]:
    """One thread a rank; gloo over loopback; our own code, whatever the interpreter."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",  # DeepSpeed asks the machine otherwise, and warns
    }


def _outcome(folder: Path, trial: Trial) -> Outcome:
    failures = sorted(folder.glob("*.failure"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        raise TrialError(f"rank {failures[0].stem}:\n{failures[0].read_text()}")
    files = [folder / f"{rank}.json" for rank in range(trial.layout.world_size)]
    if not all(file.exists() for file in files):
        output = (folder / "output").read_text(errors="replace")[-2000:]
        raise TrialError(f"no result of some ranks; their output ends with:\n{output}")
    results = [json.loads(file.read_text()) for file in files]
    # Ranks that hold different parts of the batch have different losses, others have none.
    losses = []
    for of_ranks in zip(*(result["losses"] for result in results), strict=True):
        known = [loss for loss in of_ranks if loss is not None]
        losses.append(sum(known) / len(known))
    return Outcome(losses, max(_median(result["step_s"]) for result in results))


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if not ordered:
        return 0.0
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


# ----------------------------------------------------------------- the launcher and its ranks


def _launch(folder: Path) -> None:
    """The launcher process: fork the ranks, wait for them, kill what is left."""
    call = json.loads((folder / "call.json").read_text())
    trial = Trial.from_json(call["trial"])
    # Once, before the fork. torch.optim imports _dynamo at its first use, which takes seconds.
    importlib.import_module("torch._dynamo")
    importlib.import_module(f"benchmarks.contestants.{contestant(trial.contestant).module}")
    ranks: dict[int, int] = {}
    for rank in range(trial.layout.world_size):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, trial, folder, deadline_s=call["deadline_s"])
        ranks[pid] = rank
    end = time.monotonic() + call["deadline_s"]
    while ranks and time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.05)
            continue
        rank = ranks.pop(pid)
        if status != 0:
            if not list(folder.glob("*.failure")):
                (folder / f"{rank}.failure").write_text(f"it ended with status {status}")
            break
    else:
        if ranks:
            slow = "-".join(str(rank) for rank in sorted(ranks.values()))
            (folder / f"{slow}.failure").write_text("not done at the deadline")
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run_rank(rank: int, trial: Trial, folder: Path, *, deadline_s: float) -> None:
    """One forked rank; never returns."""
    code = 1
    try:
        result = _train(rank, trial, folder, deadline_s=deadline_s)
        temporary = folder / f"{rank}.json.tmp"
        temporary.write_text(json.dumps(result))
        temporary.rename(folder / f"{rank}.json")
        code = 0
    except BaseException:
        temporary = folder / f"{rank}.failure.tmp"
        temporary.write_text(traceback.format_exc())
        temporary.rename(folder / f"{rank}.failure")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(
    rank: int, trial: Trial, folder: Path, *, deadline_s: float
) -> dict[str, list[float | None]]:
    """The losses of all steps and the durations of the timed ones, on this rank."""
    import torch.distributed as dist

    from benchmarks.reference import batch_of, initial_weights

    world_size = trial.layout.world_size
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=deadline_s),
    )
    module = importlib.import_module(
        f"benchmarks.contestants.{contestant(trial.contestant).module}"
    )
    train = module.build(trial, initial_weights(trial.model, trial.seed))
    batches = [batch_of(trial, step) for step in range(trial.warmup + trial.steps)]
    losses: list[float | None] = []
    ends: list[float] = []

    def done(loss: float | None) -> None:
        losses.append(loss)
        ends.append(time.perf_counter())

    dist.barrier()
    begin = time.perf_counter()
    train(batches, done)
    dist.barrier()  # a rank that leaves early would break the others' last step
    starts = [begin, *ends]
    durations = [end - start for start, end in zip(starts, ends, strict=False)]
    return {"losses": losses, "step_s": [*durations[trial.warmup :]]}


if __name__ == "__main__":
    _launch(Path(sys.argv[1]))
