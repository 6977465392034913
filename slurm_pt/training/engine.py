"""What the loop of steps drives: forward, backward, the agreement of all ranks, the update.

`TrainStep` is our own engine; `DeepSpeedEngine` is another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from slurm_pt.errors import DivergedError
from slurm_pt.parallel.groups import ProcessGroups, all_reduce

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from slurm_pt.config.schema import TrainConfig
    from slurm_pt.parallel.stored import Stored
    from slurm_pt.training.feed import Feed
    from slurm_pt.training.loss_scale import LossScale
    from slurm_pt.training.micro_batch import MicroBatch
    from slurm_pt.training.stored_state import StoredState


@dataclass(frozen=True)
class Totals:
    """What all ranks know after the one reduction of a step."""

    loss: float
    stop: bool
    save: bool
    blank: bool
    """Some rank had no tokens: this step does not count."""
    grad_norm: float | None = None
    """Of a local step: the root of the mean square over the replicas. None: the engine finds it
    in the update."""
    replica_norm: float | None = None
    """Gradient norm of this rank's own replica; all have the same unless the step is local."""


@dataclass(frozen=True)
class Update:
    """What the update of a step did."""

    grad_norm: float
    """Before clipping."""
    skipped: bool = False
    """float16: a gradient overflowed on some rank, and the weights stayed as they were."""


@dataclass(frozen=True)
class Evaluation:
    """What all ranks know after looking at the held-out tokens."""

    loss: float | None
    """None: broken off by a wish to stop."""
    stop: bool


class StepEngine(Protocol):
    """Runs the steps of one rank. Every call is made by all ranks."""

    config: TrainConfig
    groups: ProcessGroups
    feed: Feed
    phase: Callable[[str], None]
    """Told what a step is at."""
    loss_scale: LossScale

    @property
    def updates(self) -> int:
        """How often the weights were changed."""

    def gradients(self, step: int, micro_batches: list[MicroBatch]) -> Tensor:
        """This rank's part of the mean loss; the step's gradients are kept for `update`.

        `step` steps are completed.
        """

    def reduce(self, step: int, loss: Tensor, *, stop: bool, save: bool, blank: bool) -> Totals:
        """The one collective over all ranks."""

    def update(self, totals: Totals, lr: float) -> Update:
        """Change the weights.

        Raises DivergedError, with the weights as they were, for a gradient that is not finite.
        """

    def synchronise(self, step: int) -> None:
        """After the update that follows `step` completed ones: replicas agree, where it is time."""

    def evaluate(self, stop_requested: Callable[[], bool]) -> Evaluation:
        """The mean loss of the held-out batches, without dropout."""

    def stored(self) -> StoredState:
        """The state itself, to save or to load into."""

    def loaded(self, updates: int) -> None:
        """Take over what was loaded into `stored`, after so many updates."""

    def base(self) -> Stored:
        """The weights themselves, to be loaded from another run's checkpoint."""

    def begin(self) -> None:
        """Take over the weights as they are now, before the first step of a run."""


def sum_over_all(
    numbers: list[Tensor], *, stop: bool, save: bool, blank: bool, groups: ProcessGroups
) -> tuple[list[float], list[bool]]:
    """The sums of float64 scalars over all ranks, and whether anyone raised each flag."""
    flags = torch.tensor([stop, save, blank], dtype=torch.float64)
    sums = torch.cat([torch.stack(numbers), flags.to(groups.device)])
    totals = all_reduce(sums, groups.world).tolist()
    return totals[: len(numbers)], [count > 0 for count in totals[len(numbers) :]]


def diverged(grad_norm: float) -> DivergedError:
    """The error for a gradient norm that is not finite."""
    return DivergedError(
        f"the gradient norm is {grad_norm}: the training has diverged. The weights were "
        "left as they were, and checkpoints from before are whole. Lower train.lr, set "
        "train.grad_clip or more train.warmup_steps, or look for damaged data"
    )
