"""The random generators of one rank as JSON, and back.

Each rank has its own state and saves its own: one rank's state given to all makes every rank but
one draw other numbers after a resume than without it (field-log.md, F54).
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slurm_pt.errors import CheckpointError


def capture_random_state() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's global generators, and each CUDA device's."""
    version, words, gauss_next = random.getstate()
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    # Asking torch.cuda for a state would start CUDA in a process that never used it.
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it bare
    cuda = torch.cuda.get_rng_state_all() if in_use else []
    return {
        "python": [version, list(words), gauss_next],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached_gaussian],
        "torch": _render_bytes(torch.get_rng_state()),
        "cuda": [_render_bytes(state) for state in cuda],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set every generator to what `capture_random_state` saw.

    Raises:
        CheckpointError: the state has generators of more CUDA devices than there are here. Fewer
            are accepted: a device that was not in use then has nothing to go on from.
    """
    devices = torch.cuda.device_count() if state["cuda"] else 0
    if len(state["cuda"]) > devices:
        raise CheckpointError(
            f"the checkpoint has the random state of {len(state['cuda'])} CUDA devices of this "
            f"rank, and {devices} are visible. To fix: give each rank as many GPUs as before"
        )
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    kind, keys, position, has_gauss, cached_gaussian = state["numpy"]
    np.random.set_state(
        (kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian)
    )
    torch.set_rng_state(_parse_bytes(state["torch"]))
    for device, text in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(_parse_bytes(text), device)


def _render_bytes(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _parse_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
