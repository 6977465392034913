"""AdamW over named parameters, and the learning rate as a function of the step number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

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

    A checkpoint can so be loaded into a fresh one. Matrices decay, vectors do not. It calls torch's
    functional form: building a torch.optim.Optimizer imports torch._dynamo, which costs every
    rank more than two seconds at each start.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig):
        self.parameters = dict(parameters)
        self.config = config
        self.moments = {
            name: (torch.zeros_like(parameter), torch.zeros_like(parameter))
            for name, parameter in self.parameters.items()
        }
        # One number each, on the parameter's device: the fused kernel reads and raises it there.
        self.updates = 0
        """How often it has changed the weights."""
        self.steps = {
            name: torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the parameters from their gradients."""
        self.updates += 1
        matrices = [name for name, parameter in self.parameters.items() if parameter.ndim >= 2]
        vectors = [name for name, parameter in self.parameters.items() if parameter.ndim < 2]
        self._update(matrices, lr, weight_decay=self.config.weight_decay)
        self._update(vectors, lr, weight_decay=0.0)

    def _update(self, names: list[str], lr: float, *, weight_decay: float) -> None:
        named = [(name, self.parameters[name]) for name in names]
        trained = [(name, p, p.grad) for name, p in named if p.grad is not None]
        if not trained:
            return
        adamw(
            [parameter.data for _, parameter, _ in trained],
            [gradient for _, _, gradient in trained],
            [self.moments[name][0] for name, _, _ in trained],
            [self.moments[name][1] for name, _, _ in trained],
            [],
            [self.steps[name] for name, _, _ in trained],
            fused=True,  # one pass over memory where foreach makes a dozen
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.config.eps,
            maximize=False,
        )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The moments themselves, not copies, by kind and parameter."""
        return {
            kind: {name: moments[index] for name, moments in self.moments.items()}
            for index, kind in enumerate(("exp_avg", "exp_avg_sq"))
        }

    def set_step(self, steps: int) -> None:
        """Tell it how many updates were made, after moments were loaded into `state`."""
        self.updates = steps
        for count in self.steps.values():
            count.fill_(float(steps))
