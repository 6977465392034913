"""All ranks of a job agreeing: what one of them cannot do, none of them takes for done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from slurm_pt.errors import CheckpointError, RunFolderError, SlurmPtError

log = logging.getLogger(__name__)
T = TypeVar("T")


class LostRankError(RuntimeError):
    """A rank did not take part. No user can mend that by a setting: the attempt has failed."""


class Peers:
    """All ranks, over one group; an error on one of them becomes an error on all."""

    def __init__(self, group: dist.ProcessGroup, rank: int):
        self.group, self.rank, self.world_size = group, rank, group.size()

    def meet(self, purpose: str, timeout_s: float) -> None:
        """Return when all ranks are here.

        Raises:
            LostRankError: some are not after `timeout_s`; rank 0 can say which.
        """
        try:
            dist.monitored_barrier(self.group, timedelta(seconds=timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise LostRankError(
                f"not all ranks came to {purpose} within {timeout_s:g} s. Each rank must call it, "
                f"for the same step. rank={self.rank} says: {error}"
            ) from error

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_rank_0(self, produce: Callable[[], T]) -> T:
        """What rank 0 produced, on every rank; its error is raised on every rank."""
        outcome: list[Any] = [attempt(produce) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        value, failure = outcome[0]
        if failure is not None:
            raise failure.kind(failure.text)
        result: T = value
        return result

    def on_each(self, produce: Callable[[], T]) -> T:
        """What this rank produced; an error of any rank is raised on every rank."""
        value, failure = attempt(produce)
        _raise_any(self.gather(failure))
        return value  # type: ignore[return-value]  # it is None only beside a failure

    def on_all(self, produce: Callable[[], T]) -> list[T]:
        """What each rank produced, on every rank; an error of any is raised on every rank."""
        outcomes = self.gather(attempt(produce))
        _raise_any([failure for _, failure in outcomes])
        return [value for value, _ in outcomes]  # type: ignore[misc]  # as in on_each


@dataclass(frozen=True)
class Failure:
    """An error in a form that travels: exceptions with own constructors do not unpickle."""

    kind: type[SlurmPtError]
    text: str


def attempt(produce: Callable[[], T]) -> tuple[T | None, Failure | None]:
    """What was produced, or why it was not."""
    try:
        return produce(), None
    except (RunFolderError, CheckpointError) as error:
        return None, Failure(type(error), str(error))
    except (SlurmPtError, OSError) as error:
        return None, Failure(CheckpointError, str(error))
    except Exception as error:  # a fault of ours: the traceback stays here, peers get the name
        log.exception("event=checkpoint_fault")
        return None, Failure(CheckpointError, f"{type(error).__name__}: {error}")


def _raise_any(failures: list[Failure | None]) -> None:
    """Raise one error that names each rank with a failure, if there is any."""
    found = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if found:
        text = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in found)
        raise found[0][1].kind(text)
