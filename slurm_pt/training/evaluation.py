"""The mean loss of the held-out tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slurm_pt.parallel.groups import ProcessGroups, all_reduce
from slurm_pt.parallel.pipeline import Chunk, Message, run_forward_pipeline
from slurm_pt.training.engine import Evaluation
from slurm_pt.training.feed import Feed
from slurm_pt.training.micro_batch import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def evaluate(
    chunks: Sequence[Chunk[MicroBatch]],
    feed: Feed,
    *,
    batches: int,
    message: Message,
    groups: ProcessGroups,
    stop_requested: Callable[[], bool],
) -> Evaluation:
    """The mean loss over so many global batches; dropout is as the caller has set it.

    Between two of them ranks agree whether to go on: a long evaluation must not use up a
    preempted job's grace.
    """
    loss_sum = 0.0
    for number in range(batches):
        loss = run_forward_pipeline(chunks, feed.validation(number), message=message, groups=groups)
        if groups.place.tp_rank != 0:  # each tp rank has the whole loss: count it once
            loss.zero_()
        stop = torch.full_like(loss, float(stop_requested()))
        sums = torch.stack([loss / groups.layout.dp, stop])
        batch_loss, stops = all_reduce(sums, groups.world).tolist()
        if stops > 0:
            return Evaluation(loss=None, stop=True)
        loss_sum += batch_loss
    return Evaluation(loss=loss_sum / batches, stop=False)
