"""Updates that each replica makes on its own, and the outer step that makes replicas equal again.

Replicas on two ends of a slow link exchange weights once in `train.local_steps` steps instead of
gradients in each.

Sources: Lin et al. 2018, arXiv:1808.07217 (post-local SGD: the mean of the weights, after a first
phase of ordinary steps); Douillard et al. 2023, arXiv:2311.08105 (DiLoCo: old weights minus that
mean are the gradient of an outer Nesterov step). Moments stay each replica's own in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slurm_pt.config.choices import Outer
from slurm_pt.parallel.buckets import in_buckets
from slurm_pt.parallel.groups import all_reduce

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from torch import Tensor, nn

    from slurm_pt.config.schema import TrainConfig


class LocalUpdates:
    """Which updates are local, and the weights that the replicas last agreed on.

    Args:
        parameters: this rank's, by name.
        group: the ranks that hold the same parameters of the other replicas.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainConfig,
        *,
        group: dist.ProcessGroup,
    ):
        self._parameters, self._config, self._group = dict(parameters), config, group
        self.agreed = {name: p.detach().clone() for name, p in self._parameters.items()}
        """The weights that all replicas had last."""
        nesterov = config.outer is Outer.nesterov
        self.momentum = (
            {name: torch.zeros_like(weight) for name, weight in self.agreed.items()}
            if nesterov
            else {}
        )

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        parameters: Mapping[str, nn.Parameter],
        *,
        group: dist.ProcessGroup,
    ) -> LocalUpdates | None:
        """Those of a run; None if all of its updates are common."""
        return cls(parameters, config, group=group) if config.local_steps > 1 else None

    def is_local(self, step: int) -> bool:
        """Whether each replica makes the update that follows `step` completed ones on its own."""
        return step >= self._config.local_after

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What all replicas have, by kind and parameter: the tensors themselves."""
        held = {"model": self.agreed}
        return held | {"outer/momentum": self.momentum} if self.momentum else held

    def agree(self) -> None:
        """Take the weights, which all replicas have, as the agreed ones."""
        for name, parameter in self._parameters.items():
            self.agreed[name].copy_(parameter.detach())

    @torch.no_grad()
    def begin_from_agreed(self) -> None:
        """Take the agreed weights as this replica's own."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.agreed[name])

    def synchronise_if_due(self, step: int) -> None:
        """The outer step, after the update that follows `step` completed ones. Collective.

        When the number of completed steps is a multiple of `local_steps`, and after the last step.
        """
        completed = step + 1
        if not self.is_local(step):
            self.agree()  # an ordinary step leaves all replicas with the same weights
        elif completed % self._config.local_steps == 0 or completed == self._config.steps:
            self._synchronise()

    @torch.no_grad()
    def _synchronise(self) -> None:
        for bucket in in_buckets(self._parameters.values()):
            flat = torch.cat([parameter.detach().flatten() for parameter in bucket])
            all_reduce(flat, self._group).div_(self._group.size())
            begin = 0
            for parameter in bucket:
                mean = flat[begin : begin + parameter.numel()]
                parameter.copy_(mean.view_as(parameter))
                begin += parameter.numel()
        for name, parameter in self._parameters.items():
            if name in self.momentum:
                self._outer_step(parameter, self.agreed[name], self.momentum[name])
        self.agree()

    def _outer_step(self, parameter: nn.Parameter, agreed: Tensor, momentum: Tensor) -> None:
        """Nesterov's step from the agreed weights to `parameter`, which holds the replicas' mean.

        The same formula as torch.optim.SGD's.
        """
        decay, lr = self._config.outer_momentum, self._config.outer_lr
        gradient = agreed - parameter
        momentum.mul_(decay).add_(gradient)
        parameter.copy_(agreed - lr * (gradient + decay * momentum))
