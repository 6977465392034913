"""The factor on the loss that keeps small float16 gradients from vanishing.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; the rule of growth and back-off is
that of torch.amp.GradScaler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_pt.config.choices import DType

if TYPE_CHECKING:
    from slurm_pt.config.schema import TrainConfig


class LossScale:
    """Halves when a gradient overflows, doubles after `window` steps without; 1 and fixed without.

    Every rank has its own, and all are equal: whether a step overflowed is read from the gradient
    norm, which is summed over all ranks.
    """

    def __init__(self, factor: float = 1.0, *, window: int | None = None):
        self.factor = factor
        self.window = window
        self.good_steps = 0
        """Since the last overflow or growth."""

    @classmethod
    def of(cls, config: TrainConfig) -> LossScale:
        """That of a run's number format."""
        if config.dtype is not DType.float16:
            return cls()
        return cls(config.loss_scale, window=config.loss_scale_window)

    @property
    def is_dynamic(self) -> bool:
        return self.window is not None

    def note(self, *, overflow: bool) -> None:
        """Take notice of how a step went."""
        if self.window is None:
            return
        if overflow:
            self.factor, self.good_steps = max(1.0, self.factor / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.factor, self.good_steps = self.factor * 2, 0

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"factor": self.factor, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint; one without the state was saved in another format."""
        if state is not None and self.is_dynamic:
            self.factor, self.good_steps = float(state["factor"]), int(state["good_steps"])
