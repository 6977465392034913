"""slurm_pt: model-parallel PyTorch training on Slurm.

The public names: `main` decorates a Hydra program, `train` runs our trainer on its config, and
`start` gives a loop of your own its ranks, run folder, checkpoints and the wish to stop. `split`
splits a module of your own by a `SplitPlan`; `cross_entropy` is the loss of split logits.
Importing this imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_pt.parallel.split_model import split
    from slurm_pt.parallel.split_plan import SplitPlan
    from slurm_pt.parallel.vocabulary import cross_entropy
    from slurm_pt.program import main
    from slurm_pt.run import Run
    from slurm_pt.starting import start
    from slurm_pt.trainer import train

__version__ = "0.1.0"
__all__ = [
    "Run",
    "SplitPlan",
    "__version__",
    "cross_entropy",
    "main",
    "split",
    "start",
    "train",
]

_HOMES = {
    "main": "program",
    "Run": "run",
    "start": "starting",
    "train": "trainer",
    "split": "parallel.split_model",
    "cross_entropy": "parallel.vocabulary",
    "SplitPlan": "parallel.split_plan",
}


def __getattr__(name: str) -> Any:
    """Loads a public name on first use, so that the login side never pays for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'slurm_pt' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"slurm_pt.{_HOMES[name]}"), name)
