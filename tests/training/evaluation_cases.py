"""What the ranks of test_evaluation do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.data import TokenDataset
from slurm_pt.training.loop import LoopEnd, StepRecord, train_loop
from slurm_pt.training.step import TrainStep
from tests.training.cases import MODEL, TRAIN, build, groups_of, ignore, never

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from slurm_pt.parallel.groups import ProcessGroups

CONFIG = replace(TRAIN, steps=5, eval_interval=2, eval_batches=3)
DROPOUT = replace(MODEL, dropout=0.1)


def evaluations(
    tokens: Path, layouts: list[tuple[int, int, int]]
) -> list[list[tuple[int, float, float | None]]]:
    """(step, loss, loss on held-out tokens) of each step in each layout."""
    found = []
    for layout in layouts:
        groups = groups_of(ParallelLayout(*layout))
        records, _ = _run(tokens, groups, never)
        found.append([(record.step, record.loss, record.eval_loss) for record in records])
        groups.close()
    return found


def stopped_while_evaluating(tokens: Path) -> tuple[int, bool, list[float | None]]:
    """Rank 1 is asked to stop in the middle of the first evaluation, after step 2."""
    groups = groups_of(ParallelLayout(2, 1, 1))
    phases: list[str] = []

    def stop_requested() -> bool:
        return groups.rank == 1 and phases[-1] == "evaluate"

    records, end = _run(tokens, groups, stop_requested, phases)
    groups.close()
    return end.step, end.stopped, [record.eval_loss for record in records]


def _run(
    tokens: Path,
    groups: ProcessGroups,
    stop_requested: Callable[[], bool],
    phases: list[str] | None = None,
) -> tuple[list[StepRecord], LoopEnd]:
    dataset = TokenDataset(
        tokens,
        seq_len=CONFIG.seq_len,
        global_batch_size=CONFIG.global_batch_size,
        vocab_size=MODEL.vocab_size,
        seed=CONFIG.seed,
        validation_fraction=0.3,
    )
    phase = ignore if phases is None else phases.append
    engine = TrainStep(build(DROPOUT, CONFIG, groups), CONFIG, dataset, phase=phase)
    records: list[StepRecord] = []
    end = train_loop(engine, stop_requested=stop_requested, record=records.append)
    return records, end
