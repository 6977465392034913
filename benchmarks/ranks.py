"""Runs one trial on fresh gloo processes of this machine, with the interpreter it needs."""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from dataclasses import dataclass

from benchmarks.contestants import contestant
from benchmarks.trial import Trial
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Outcome:
    """What the ranks of a trial measured."""

    losses: list[float]
    """The global batch's mean loss of every step, warm-up included."""
    step_s: float
    """The median timed step of the slowest rank; 0.0 if nothing was timed."""


def run_trial(trial: Trial, *, python: str = sys.executable, deadline_s: float = 600.0) -> Outcome:
    """Train once. Raises RankFailedError with the traceback of the first rank that failed."""
    results = run_ranks(
        trial.layout.world_size,
        "benchmarks.ranks:train",
        trial,
        deadline_s=deadline_s,
        python=python,
        environ={"DS_ACCELERATOR": "cpu"},  # DeepSpeed asks the machine otherwise, and warns
        imports=[_module_of(trial)],
    )
    # Ranks that hold different parts of the batch have different losses, others have none.
    losses = []
    for of_ranks in zip(*(of_rank for of_rank, _ in results), strict=True):
        known = [loss for loss in of_ranks if loss is not None]
        losses.append(sum(known) / len(known))
    return Outcome(losses, max(statistics.median(step_s or [0.0]) for _, step_s in results))


def train(trial: Trial) -> tuple[list[float | None], list[float]]:
    """The losses of all steps and the durations of the timed ones, on this rank."""
    import torch.distributed as dist

    from benchmarks.reference import batch_of, initial_weights

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    module = importlib.import_module(_module_of(trial))
    run = module.build(trial, initial_weights(trial.model, trial.seed))
    batches = [batch_of(trial, step) for step in range(trial.warmup + trial.steps)]
    losses: list[float | None] = []
    ends: list[float] = []

    def done(loss: float | None) -> None:
        losses.append(loss)
        ends.append(time.perf_counter())

    dist.barrier()
    begin = time.perf_counter()
    run(batches, done)
    starts = [begin, *ends]
    durations = [end - start for start, end in zip(starts, ends, strict=False)]
    return losses, durations[trial.warmup :]


def _module_of(trial: Trial) -> str:
    return f"benchmarks.contestants.{contestant(trial.contestant).module}"
