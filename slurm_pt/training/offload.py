"""Host memory for an optimizer that keeps its state and does its work there.

Gradients come in and updated weights go out through pinned memory, at the full speed of the bus.

Source: Ren et al. 2021, arXiv:2101.06840 (ZeRO-Offload).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping


class HostCopies:
    """Copies of some weights, and room for their gradients; 8 bytes for a float32 weight.

    The weights are taken once, here: from then on they may change by `send_weights` alone.
    """

    def __init__(self, weights: Mapping[str, Tensor]):
        self.weights = {name: _host_like(weight) for name, weight in weights.items()}
        self.gradients = {name: _host_like(weight) for name, weight in weights.items()}
        _copy(weights, self.weights)

    def fetch_gradients(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients, in host memory until the next call."""
        _copy(gradients, self.gradients)
        return {name: self.gradients[name] for name in gradients}

    def send_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite these with the copies. A GPU does it before what it is given next."""
        for name, weight in weights.items():
            weight.copy_(self.weights[name], non_blocking=True)


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copy(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Return when all are copied; what was sent before has then arrived, too."""
    for name, source in sources.items():
        targets[name].copy_(source, non_blocking=True)
    if any(source.is_cuda for source in sources.values()):
        torch.cuda.current_stream().synchronize()
