"""Hydra's launcher `hydra/launcher=slurm_pt`: each point of a sweep becomes a run in Slurm's hands.

Imports nothing heavy: Hydra loads every plugin at each start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class SlurmPtLauncherConfig:
    """How the launcher waits. What is asked of Slurm stands in the `slurm` group."""

    _target_: str = "hydra_plugins.slurm_pt_launcher.SlurmPtLauncher"
    wait: bool = True
    """Stay until every run has ended, with a live table; false: return at once."""
    local: bool = False
    """Use local processes although there is a Slurm."""


ConfigStore.instance().store(
    group="hydra/launcher", name="slurm_pt", node=SlurmPtLauncherConfig, provider="slurm_pt_launcher"
)


class SlurmPtLauncher(Launcher):
    """Submits, and shows one live table until all runs have ended."""

    def __init__(self, wait: bool = True, local: bool = False):
        self.wait, self.local = wait, local
        self.hydra_context: HydraContext | None = None
        self.task_function: TaskFunction | None = None
        self.config: DictConfig | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from slurm_pt.launcher import launch_points

        if self.hydra_context is None or self.task_function is None or self.config is None:
            raise RuntimeError("Hydra calls setup before launch")
        composed: list[tuple[Any, Sequence[str]]] = []
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
            composed.append((cfg, overrides))
        return launch_points(composed, self.task_function, wait=self.wait, local=self.local)
