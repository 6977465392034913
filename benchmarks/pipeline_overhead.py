"""What a pipeline costs beside its passes, and whether it stands idle as long as planned.

    python -m benchmarks.pipeline_overhead                       the idle time of every schedule
    python -m benchmarks.pipeline_overhead --baseline FILE       and 1F1B against an older pipeline

Idle time: passes that sleep, so a machine with fewer cores than ranks can tell. The measured share
is 1 - (sleep asked for) / (time of a step); timing and messages count as idle too.

The baseline is a file with a `run_pipeline(forward, micro_batches, *, message, groups)`, such as
`git show COMMIT:slurm_pt/parallel/pipeline.py` of before the schedules. Both run in the same
processes in turn, on passes that do next to nothing, and pairs are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_pt.config.choices import Schedule
from slurm_pt.parallel.groups import ProcessGroups, create_groups
from slurm_pt.parallel.pipeline import Chunk, Message, run_pipeline
from slurm_pt.parallel.weight_gradients import WeightGradients
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.plan.schedule import make_table
from slurm_pt.plan.schedule_cost import bubble_share
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
SHAPE = (4, 64)
RUNS = [
    (Schedule.gpipe, 1),
    (Schedule.one_f_one_b, 1),
    (Schedule.zero_bubble, 1),
    (Schedule.interleaved, 2),
]


class SleepingLayer(torch.autograd.Function):
    """Takes `seconds` forward, as long for its input gradient and again for its weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, later: SleepLater) -> Tensor:
        ctx.seconds, ctx.later = seconds, later
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_output,) = grads
        time.sleep(ctx.seconds)
        ctx.later.sleep(ctx.seconds)
        return grad_output.clone(), None, None


class SleepLater(WeightGradients):
    """Puts sleeps off where weight gradients would be."""

    def sleep(self, seconds: float) -> None:
        if self._collected is None:
            time.sleep(seconds)
        else:
            self._collected.append(lambda: time.sleep(seconds))


def make_groups() -> ProcessGroups:
    """One pipeline over all ranks."""
    layout = ParallelLayout(tp=1, pp=dist.get_world_size(), dp=1)
    return create_groups(layout, rank=dist.get_rank(), device=CPU, timeout_s=120.0)


def step_times(forward_s: float, num_microbatches: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a step with each schedule, a rank's forward passes taking `forward_s` each."""
    groups, later = make_groups(), SleepLater()
    inputs = [torch.ones(SHAPE, requires_grad=True) for _ in range(num_microbatches)]
    found: dict[str, list[float]] = {schedule.value: [] for schedule, _ in RUNS}
    for _ in range(repeats):
        for schedule, virtual in RUNS:
            chunks = [
                sleeping_chunk(
                    forward_s / virtual, later, last=groups.last_stage and chunk == virtual - 1
                )
                for chunk in range(virtual)
            ]
            found[schedule.value].append(
                timed(
                    lambda: run_pipeline(
                        chunks,  # noqa: B023
                        inputs,
                        message=Message(SHAPE, torch.float32),
                        groups=groups,
                        schedule=schedule,  # noqa: B023
                        weight_gradients=later,
                    )
                )
            )
    groups.close()
    return found


def sleeping_chunk(seconds: float, later: SleepLater, *, last: bool) -> Chunk[Tensor]:
    """The forward pass of a chunk that takes this long."""

    def forward(entered: Tensor | None, micro_batch: Tensor) -> Tensor:
        x = micro_batch if entered is None else entered
        output: Tensor = SleepingLayer.apply(x, seconds, later)  # type: ignore[no-untyped-call]
        return output.mean() if last else output

    return forward


def pairs_of_times(baseline: str, num_microbatches: int, repeats: int) -> list[tuple[float, float]]:
    """Seconds of a 1F1B step (older, this one), on passes that do next to nothing."""
    specification = importlib.util.spec_from_file_location("older_pipeline", baseline)
    assert specification is not None
    assert specification.loader is not None
    older = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = older  # dataclasses look their module up
    specification.loader.exec_module(older)
    groups = make_groups()
    weight = torch.ones(SHAPE[-1], requires_grad=True)
    inputs = [torch.ones(SHAPE) for _ in range(num_microbatches)]

    def forward(entered: Tensor | None, micro_batch: Tensor) -> Tensor:
        output = (micro_batch if entered is None else entered) * weight
        return output.mean() if groups.last_stage else output

    def run_older() -> None:
        message = older.Message(SHAPE, torch.float32)
        older.run_pipeline(forward, inputs, message=message, groups=groups)

    def run_this() -> None:
        message = Message(SHAPE, torch.float32)
        run_pipeline([forward], inputs, message=message, groups=groups)

    run_older()
    run_this()
    pairs = []
    for number in range(repeats):
        if number % 2:
            this_s, older_s = timed(run_this), timed(run_older)
        else:
            older_s, this_s = timed(run_older), timed(run_this)
        pairs.append((older_s, this_s))
    groups.close()
    return pairs


def timed(run: Callable[[], Any]) -> float:
    """Seconds until the slowest rank is done, from a common start."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--baseline", help="file of an older pipeline")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--forward-s", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=100)
    options = parser.parse_args()
    pp, count = options.pp, options.num_microbatches
    print(f"idle share, pp={pp}, {count} micro-batches, passes of {options.forward_s * 1e3:g} ms")
    times, *_ = run_ranks(pp, f"{MODULE}:step_times", options.forward_s, count, options.repeats)
    for schedule, virtual in RUNS:
        table = make_table(schedule, pp=pp, num_microbatches=count, virtual_stages=virtual)
        planned = bubble_share(table)
        work_s = 3 * count * options.forward_s
        middle = 1.0 - work_s / statistics.median(times[schedule.value])
        best = 1.0 - work_s / min(times[schedule.value])
        print(
            f"{schedule.value:12} planned {planned:.4f} measured {middle:.4f} (median of "
            f"{options.repeats}, {middle / planned:.3f} of planned), {best:.4f} (best, "
            f"{best / planned:.3f})"
        )
    if options.baseline:
        path = str(Path(options.baseline).resolve())
        pairs, *_ = run_ranks(pp, f"{MODULE}:pairs_of_times", path, count, options.pairs)
        report_pairs(pairs)


MODULE = "benchmarks.pipeline_overhead"


def report_pairs(pairs: list[tuple[float, float]]) -> None:
    """Print medians, and quartiles of the ratio within pairs."""
    older = statistics.median(older for older, _ in pairs)
    this = statistics.median(this for _, this in pairs)
    low, middle, high = statistics.quantiles((this / older for older, this in pairs), n=4)
    print(
        f"1F1B without work: older {older * 1e3:.2f} ms, this {this * 1e3:.2f} ms a step (medians)"
    )
    print(f"ratio of pairs: median {middle:.3f}, quartiles {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
