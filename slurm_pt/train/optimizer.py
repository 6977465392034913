"""AdamW over named parameters, and the learning rate as a function of the step number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_pt.config.schema import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of the update that follows `step` completed ones.

    Linear warm-up that reaches the peak in its last step, then a cosine that reaches min_lr in
    the last step of the run, and stays there.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = config.steps - 1 - config.warmup_steps
    if decay_steps <= 0:
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1.0 + math.cos(math.pi * progress))


class NamedAdamW:
    """torch's AdamW, whose moments are known by the parameters' names and exist from the start.

    A checkpoint can so be loaded into a fresh one. Matrices decay, vectors do not.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig):
        self.parameters = dict(parameters)
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        vectors = [p for p in self.parameters.values() if p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )
        for parameter in self.parameters.values():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()

    def state_tensors(self) -> dict[str, Tensor]:
        """The moments themselves, not copies, as `exp_avg/<name>` and `exp_avg_sq/<name>`."""
        return {
            f"{moment}/{name}": self.adamw.state[parameter][moment]
            for name, parameter in self.parameters.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }

    def set_step(self, steps: int) -> None:
        """Tell it how many updates were made, after moments were loaded into `state_tensors`."""
        for state in self.adamw.state.values():
            state["step"].fill_(float(steps))
