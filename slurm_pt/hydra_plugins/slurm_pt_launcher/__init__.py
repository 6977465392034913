"""What Hydra finds of us by itself: the launcher `hydra/launcher=slurm_pt`, and our config groups.

Imports nothing heavy: Hydra loads every plugin at each start.
"""

# No `from __future__ import annotations`: Hydra executes this module before it is in sys.modules,
# where dataclasses look for the names in annotations that are text.
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from slurm_pt.config.store import register_schemas

register_schemas()


@dataclass
class SlurmPtLauncherConfig:
    """How the launcher waits. What is asked of Slurm stands in the `slurm` group."""

    _target_: str = "hydra_plugins.slurm_pt_launcher.SlurmPtLauncher"
    wait: bool = True
    """Stay until every run has ended, with a live table; false: return at once."""
    local: bool = False
    """Use local processes although there is a Slurm."""


ConfigStore.instance().store(
    group="hydra/launcher",
    name="slurm_pt",
    node=SlurmPtLauncherConfig,
    provider="slurm_pt_launcher",
)


class SlurmPtConfigs(SearchPathPlugin):
    """Puts our groups (slurm, parallel, checkpoint, ...) behind the program's own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="slurm_pt", path="pkg://slurm_pt.hydra_configs")


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
        # Hydra's sweeper writes the sweep's config into the folder it was started in; ours is with
        # each run.
        Path(self.config.hydra.sweep.dir, "multirun.yaml").unlink(missing_ok=True)
        composed: list[tuple[Any, Sequence[str]]] = []
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
            composed.append((cfg, overrides))
        return launch_points(composed, self.task_function, wait=self.wait, local=self.local)
