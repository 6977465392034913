"""The loop of optimizer steps. Everything it does is a function of the step number.

A step makes one collective over all ranks: a few float64 numbers that carry the gradient norm,
the loss, and whether anyone asked to stop or to save. So all ranks know the loss, and all agree
on the same last step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_pt.training.engine import Evaluation, StepEngine
from slurm_pt.training.feed import HostBatch
from slurm_pt.training.optimizer import learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.config.schema import TrainConfig
    from slurm_pt.training.prefetch import Prefetcher


@dataclass(frozen=True)
class StepRecord:
    """What one step did. The same on all ranks, but for the durations."""

    step: int
    """Completed steps, this one included."""
    loss: float
    """Mean over the tokens of the global batch, before the update."""
    grad_norm: float
    """Before clipping; of a local step, the root of the mean square over the replicas."""
    lr: float
    tokens: int
    """Over all ranks."""
    step_s: float
    """Without the time of a save that follows."""
    data_s: float
    """Part of step_s spent waiting for tokens."""
    skipped: bool | None = None
    """float16: a gradient overflowed, and the weights stayed as they were."""
    loss_scale: float | None = None
    """float16: the factor on the loss in this step."""
    eval_loss: float | None = None
    """Mean over the held-out tokens, after the update; None on steps without an evaluation."""


@dataclass(frozen=True)
class LoopEnd:
    """Why and where the loop ended."""

    step: int
    """Completed steps."""
    stopped: bool
    """Left on request, with steps still to do."""


def _never() -> bool:
    return False


def _ignore(_: Any) -> None:
    pass


def train_loop(
    engine: StepEngine,
    *,
    start_step: int = 0,
    stop_requested: Callable[[], bool] = _never,
    save_due: Callable[[], bool] = _never,
    save: Callable[[int], None] = _ignore,
    record: Callable[[StepRecord], None] = _ignore,
    prefetch: int = 0,
) -> LoopEnd:
    """Train from `start_step` completed steps to `config.steps`, or until a stop is agreed.

    `stop_requested` of any rank counts, `save_due` of rank 0 alone. `save(step)` is called on
    all ranks with the number of completed steps, between steps only: after the last step, and
    on a stop, saving is the caller's. A thread has the tokens of up to `prefetch` steps ready.

    A rank that is asked to stop while it waits for tokens does not wait on: it goes through the
    step with blank ones, and says so in the reduction. No rank then counts that step.
    """
    steps = range(start_step, engine.config.steps)
    with engine.feed.ahead(steps, prefetch=prefetch) as data:
        return _steps(engine, data, steps, stop_requested, save_due, save, record)


def _steps(
    engine: StepEngine,
    data: Prefetcher[HostBatch],
    steps: range,
    stop_requested: Callable[[], bool],
    save_due: Callable[[], bool],
    save: Callable[[int], None],
    record: Callable[[StepRecord], None],
) -> LoopEnd:
    config, groups, phase = engine.config, engine.groups, engine.phase
    for step in steps:
        begin = time.perf_counter()
        phase("data")
        micro_batches = engine.feed.take(step, data, give_up=stop_requested)
        data_s = time.perf_counter() - begin
        blank = micro_batches is None
        loss = engine.gradients(step, micro_batches or engine.feed.blank(step))
        phase("reduce")
        wants_save = groups.rank == 0 and save_due()
        totals = engine.reduce(step, loss, stop=stop_requested(), save=wants_save, blank=blank)
        if totals.blank:
            return LoopEnd(step=step, stopped=True)
        phase("optimizer")
        lr = learning_rate(step, config)
        factor = engine.loss_scale.factor
        update = engine.update(totals, lr)
        engine.synchronise(step)
        step_s = time.perf_counter() - begin
        evaluation = Evaluation(loss=None, stop=totals.stop)
        if not totals.stop and _is_evaluated(step + 1, config):
            phase("evaluate")
            evaluation = engine.evaluate(stop_requested)
        record(
            StepRecord(
                step=step + 1,
                loss=totals.loss,
                grad_norm=update.grad_norm,
                lr=lr,
                tokens=config.global_batch_size * config.seq_len,
                step_s=step_s,
                data_s=data_s,
                skipped=True if update.skipped else None,
                loss_scale=factor if engine.loss_scale.is_dynamic else None,
                eval_loss=evaluation.loss,
            )
        )
        if step + 1 == config.steps:
            break
        if evaluation.stop:
            return LoopEnd(step=step + 1, stopped=True)
        if totals.save:
            phase("save")
            save(step + 1)
    return LoopEnd(step=max(steps.start, config.steps), stopped=False)


def _is_evaluated(step: int, config: TrainConfig) -> bool:
    """Whether the held-out tokens are looked at after this many steps; always after the last."""
    interval = config.eval_interval
    return interval is not None and (step % interval == 0 or step == config.steps)
