"""What the ranks of the feed's tests run."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from slurm_pt.config.batch_rules import num_microbatches
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.data import TokenDataset
from slurm_pt.training.feed import Feed
from slurm_pt.training.loop import StepRecord, train_loop
from slurm_pt.training.step import TrainStep
from tests.training.cases import MODEL, TRAIN, build, engine_of, groups_of, never, state_of

if TYPE_CHECKING:
    from pathlib import Path

    from slurm_pt.training.data import Places
    from slurm_pt.training.micro_batch import MicroBatch

SHORT = replace(TRAIN, steps=6)


def with_and_without(folder: Path, layout: tuple[int, int, int]) -> list[list[tuple[float, float]]]:
    """The curve of a run without prefetching, with one step ahead, and with four."""
    groups = groups_of(ParallelLayout(*layout))
    found = []
    for prefetch in (0, 1, 4):
        records: list[StepRecord] = []
        engine = engine_of(folder, MODEL, TRAIN, groups)
        train_loop(engine, record=records.append, prefetch=prefetch)
        assert all(0 <= record.data_s <= record.step_s for record in records)
        found.append([(record.loss, record.grad_norm) for record in records])
    groups.close()
    return found


def fed(folder: Path, layout: tuple[int, int, int]) -> dict[str, dict[int, list[int]]]:
    """The rows that this rank is fed in step 5 and from held-out batch 1, by sample."""
    groups = groups_of(ParallelLayout(*layout))
    dataset = TokenDataset(
        folder,
        seq_len=TRAIN.seq_len,
        global_batch_size=TRAIN.global_batch_size,
        vocab_size=MODEL.vocab_size,
        seed=TRAIN.seed,
        mask_documents=True,
        validation_fraction=0.1,
    )
    count = num_microbatches(TRAIN, groups.layout.dp)
    feed = Feed(dataset, TRAIN, groups, num_microbatches=count)
    with feed.ahead(range(5, 6), prefetch=1) as data:
        batches = feed.take(5, data, give_up=never)
    assert batches is not None
    assert len(batches) == count
    _check_blank(feed.blank(5), batches)
    held_out = feed.validation(1)
    groups.close()
    first = 5 * TRAIN.global_batch_size
    return {
        "tokens": _rows(batches, "tokens", first),
        "documents": _rows(batches, "documents", first),
        "validation": _rows(held_out, "tokens", TRAIN.global_batch_size),
    }


def _rows(batches: list[MicroBatch], kind: str, first: int) -> dict[int, list[int]]:
    rows = {}
    for batch in batches:
        samples = [sample - first for sample in batch.samples]
        rows.update(zip(samples, getattr(batch, kind).tolist(), strict=False))
    return rows


def _check_blank(blank: list[MicroBatch], real: list[MicroBatch]) -> None:
    """A blank step has the shapes of a real one."""
    for one, other in zip(blank, real, strict=True):
        assert one.tokens.shape == other.tokens.shape
        assert one.samples == other.samples
        assert one.documents is not None
        assert other.documents is not None
        assert one.documents.shape == other.documents.shape
        assert one.documents.dtype == other.documents.dtype == torch.int32


class _HangingDataset(TokenDataset):
    """On the last rank, the read of one step does not come back."""

    hangs: bool
    step: int
    released: threading.Event

    def places(self, step: int, indices: Any) -> Places:
        if self.hangs and step == self.step:
            self.released.wait(300)
        return super().places(step, indices)


def hangs(folder: Path, layout: tuple[int, int, int], step: int) -> dict[str, Any]:
    """How the loop ends when one rank is asked to stop while it has no tokens for `step`."""
    groups = groups_of(ParallelLayout(*layout))
    last = groups.rank == groups.layout.world_size - 1
    dataset = _HangingDataset(
        folder,
        seq_len=SHORT.seq_len,
        global_batch_size=SHORT.global_batch_size,
        vocab_size=MODEL.vocab_size,
        seed=SHORT.seed,
    )
    dataset.hangs, dataset.step, dataset.released = last, step, threading.Event()
    stage = build(MODEL, SHORT, groups)
    engine = TrainStep(stage, SHORT, dataset)
    records: list[StepRecord] = []
    states: list[dict[str, torch.Tensor]] = []

    def record(done: StepRecord) -> None:
        records.append(done)
        tensors = state_of(stage, engine.optimizer)
        states.append({name: value.detach().clone() for name, value in tensors.items()})

    def stop_requested() -> bool:
        """The signal comes to one rank, when it already waits for tokens."""
        return last and len(records) == step and dataset.hangs

    end = train_loop(engine, stop_requested=stop_requested, record=record, prefetch=2)
    dataset.released.set()
    now = state_of(stage, engine.optimizer)
    groups.close()
    return {
        "end": (end.step, end.stopped),
        "records": len(records),
        "unchanged": all(torch.equal(states[-1][name], now[name]) for name in now),
    }
