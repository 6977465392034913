"""How flat buffers of gradients become their sums over the replicas of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from slurm_pt.parallel.groups import start_all_reduce

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor


class Reduction(Protocol):
    """One way to sum gradients. All ranks of the group make the same calls in the same order."""

    def start(self, step: int, index: int, buffer: Tensor) -> None:
        """Send a bucket on its way: flat, each replica's share of the mean; `step` ones are done.

        The buffer is not to be touched until `finish`.
        """

    def finish(self) -> None:
        """Return when every buffer that was started holds its sum, the same on all ranks."""

    def keep(self) -> None:
        """The step counts: what was learnt from its gradients may be remembered."""

    def state(self) -> dict[str, Tensor]:
        """What is remembered from one step to the next, by name: the tensors themselves."""


class AllReduce:
    """A plain sum; with a `dtype`, numbers are sent and added in that format.

    A 16-bit sum of n replicas is rounded n times: each share on its way out, and each addition.
    A sum too large for float16 becomes infinite, which shows in the gradient norm.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype | None = None):
        self._group, self._dtype = group, dtype
        self._pending: list[tuple[Tensor, Tensor, dist.Work | None]] = []

    def start(self, step: int, index: int, buffer: Tensor) -> None:  # noqa: ARG002
        if self._group.size() == 1:  # nothing is sent, so nothing is rounded
            return
        message = buffer if self._dtype is None else buffer.to(self._dtype)
        self._pending.append((buffer, message, start_all_reduce(message, self._group)))

    def finish(self) -> None:
        for buffer, message, work in self._pending:
            if work is not None:
                work.wait()
            if message is not buffer:
                buffer.copy_(message)
        self._pending.clear()

    def keep(self) -> None:
        """Nothing is remembered."""

    def state(self) -> dict[str, Tensor]:
        return {}
