"""AdamW over named parameters, and the learning rate as a function of the step number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from slurm_pt.training.offload import HostCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter or gradient: what is owned of it without ZeRO."""
    return tensor


class NamedAdamW:
    """torch's AdamW, whose moments are known by the parameters' names and exist from the start.

    A checkpoint can so be loaded into a fresh one. Matrices decay, vectors do not. It calls torch's
    functional form: building a torch.optim.Optimizer imports torch._dynamo, which costs every
    rank more than two seconds at each start.

    Args:
        owned: what it updates of a parameter, and so what it reads of the gradient: a view. With
            ZeRO a flat part, which may be empty (`RankModel.owned`).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainConfig,
        *,
        owned: Callable[[Tensor], Tensor] = whole,
    ):
        self.parameters = dict(parameters)
        self.config, self.owned = config, owned
        weights = self._weights()
        self.on_host = config.offload_optimizer and any(w.is_cuda for w in weights.values())
        """Whether it keeps its state, and does its work, in host memory."""
        self.copies: HostCopies | None = None
        """Made in the first step: by then a checkpoint has been loaded."""
        self.moments = {name: (self._moment(w), self._moment(w)) for name, w in weights.items()}
        self.updates = 0
        """How often it has changed the weights."""
        # One number each, beside the moments: the fused kernel reads and raises it there.
        self.steps = {
            name: torch.zeros((), dtype=torch.float32, device=moment.device)
            for name, (moment, _) in self.moments.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the parameters from their gradients."""
        self.updates += 1
        weights, gradients = self._weights(), self._gradients()
        if not self.on_host:
            self._update(weights, gradients, lr)
            return
        there = {name: weight for name, weight in weights.items() if weight.is_cuda}
        if self.copies is None:
            self.copies = HostCopies(there)
        fetched = self.copies.fetch_gradients(
            {name: gradient for name, gradient in gradients.items() if name in there}
        )
        self._update(weights | self.copies.weights, gradients | fetched, lr)
        self.copies.send_weights({name: there[name] for name in fetched})

    def _moment(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight, device="cpu" if self.on_host else weight.device)

    def _weights(self) -> dict[str, Tensor]:
        return {name: self.owned(p.detach()) for name, p in self.parameters.items()}

    def _gradients(self) -> dict[str, Tensor]:
        """Of what there is to update."""
        return {
            name: gradient
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
            for gradient in [self.owned(parameter.grad)]
            if gradient.numel()
        }

    def _update(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
    ) -> None:
        alike: dict[tuple[bool, torch.device], list[str]] = {}
        for name, gradient in gradients.items():
            decays = self.parameters[name].ndim >= 2
            alike.setdefault((decays, gradient.device), []).append(name)
        for (decays, _), names in alike.items():
            adamw(
                [weights[name] for name in names],
                [gradients[name] for name in names],
                [self.moments[name][0] for name in names],
                [self.moments[name][1] for name in names],
                [],
                [self.steps[name] for name in names],
                fused=True,  # one pass over memory where foreach makes a dozen
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=lr,
                weight_decay=self.config.weight_decay if decays else 0.0,
                eps=self.config.eps,
                maximize=False,
            )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The moments themselves, not copies, by kind and parameter, of what is owned of it."""
        return {
            kind: {name: moments[index] for name, moments in self.moments.items()}
            for index, kind in enumerate(("exp_avg", "exp_avg_sq"))
        }

    def set_step(self, steps: int) -> None:
        """Tell it how many updates were made, after weights and moments were loaded."""
        self.updates, self.copies = steps, None
        for count in self.steps.values():
            count.fill_(float(steps))
