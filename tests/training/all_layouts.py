"""The loss after 30 steps in every split that fits 8 ranks, as one table.

    python -m tests.training.all_layouts [--dtype float32] [--steps 30] [--part I/N]

{tp 1, 2, 4} x {pp 1, 2, 4} x {dp 1, 2} x schedules x recomputation x sequence parallelism, with
uneven stages (9 layers) and tied embeddings. Ends with 1 if one differs from one process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from slurm_pt.config.choices import DType, Recompute, Schedule
from slurm_pt.config.schema import ParallelConfig, TrainConfig
from slurm_pt.plan.layout import ParallelLayout
from tests.ranks import run_ranks
from tests.training.cases import MODEL, TRAIN, groups_of, train
from tests.training.language import write_tokens

UNEVEN = replace(MODEL, num_layers=9)
TOLERANCE = {DType.float64: 1e-9, DType.float32: 1e-4}
MOST_RANKS = 8


@dataclass(frozen=True)
class Split:
    """One line of the table."""

    tp: int
    pp: int
    dp: int
    schedule: Schedule = Schedule.one_f_one_b
    recompute: Recompute = Recompute.none
    sequence: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def parallel(self) -> ParallelConfig:
        virtual = 2 if self.schedule is Schedule.interleaved else 1
        return ParallelConfig(
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            schedule=self.schedule,
            virtual_stages=virtual,
            sequence=self.sequence,
        )

    def __str__(self) -> str:
        sequence = "split sequence" if self.sequence else ""
        what = f"tp{self.tp} pp{self.pp} dp{self.dp}  {self.schedule.value:12}"
        return f"{what} {self.recompute.value:10} {sequence:14}"


def splits() -> Iterator[Split]:
    """Every one that fits; a schedule needs stages, a split sequence needs tensor ranks."""
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2)):
        if tp * pp * dp > MOST_RANKS:
            continue
        schedules = list(Schedule) if pp > 1 else [Schedule.one_f_one_b]
        for schedule, recompute, sequence in product(schedules, Recompute, (False, True)):
            if tp > 1 or not sequence:
                yield Split(tp, pp, dp, schedule, recompute, sequence)


def last_losses(tokens: Path, wanted: list[Split], config: TrainConfig) -> list[tuple[float, ...]]:
    """Loss and gradient norm of the last step, for each split; run by the ranks."""
    found = []
    for split in wanted:
        groups = groups_of(ParallelLayout(split.tp, split.pp, split.dp))
        own = replace(config, recompute=split.recompute)
        _, _, records, _ = train(tokens, UNEVEN, own, groups, parallel=split.parallel)
        found.append((records[-1].loss, records[-1].grad_norm))
        groups.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", type=DType, default=DType.float64)
    parser.add_argument("--steps", type=int, default=TRAIN.steps)
    parser.add_argument("--part", default="1/1", help="I/N: every Nth split from the Ith on.")
    arguments = parser.parse_args()
    part, parts = (int(number) for number in arguments.part.split("/"))
    config = replace(TRAIN, dtype=arguments.dtype, steps=arguments.steps)
    wanted = list(splits())[part - 1 :: parts]
    with tempfile.TemporaryDirectory() as name:
        tokens = write_tokens(Path(name))
        (alone,) = run_ranks(1, f"{__name__}:last_losses", tokens, [Split(1, 1, 1)], config)
        worst = _compare(tokens, wanted, config, alone[0])
    limit = TOLERANCE[arguments.dtype]
    verdict = "all equal" if worst < limit else "DIFFERENT"
    print(f"{len(wanted)} splits, largest difference {worst:.1e} (limit {limit:g}): {verdict}")
    return int(worst >= limit)


def _compare(
    tokens: Path, wanted: list[Split], config: TrainConfig, alone: tuple[float, ...]
) -> float:
    """Prints the table; the largest relative difference of loss or gradient norm."""
    worst = 0.0
    for world_size in sorted({split.world_size for split in wanted}):
        members = [split for split in wanted if split.world_size == world_size]
        ranks = run_ranks(
            world_size, f"{__name__}:last_losses", tokens, members, config, deadline_s=7200.0
        )
        for index, split in enumerate(members):
            off = [
                abs(value / expected - 1.0)
                for rank in ranks
                for value, expected in zip(rank[index], alone, strict=True)
            ]
            worst = max(worst, *off)
            print(f"{split} loss {ranks[0][index][0]:.12f}  off {max(off):.1e}", flush=True)
    return worst


if __name__ == "__main__":
    from tests.training import all_layouts  # the ranks import it by this name

    sys.exit(all_layouts.main())
