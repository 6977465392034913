"""What a run is started with: its folder's name, its configuration, its program, its plan.

Written before the job is submitted, and read again by every attempt of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from slurm_pt.config import JobConfig, plain_config, signature
from slurm_pt.errors import ConfigError, Problem, RunFolderError
from slurm_pt.files import write_json, write_text
from slurm_pt.run_dir import RunDir


def run_dir_of(config: JobConfig, cfg: Any) -> RunDir:
    """The folder of a configuration: `<run_root>/<name>-<signature>`. Nothing is created."""
    root = Path(config.run_root).expanduser().absolute()
    if "\\" in str(root) or not str(root).isprintable():
        rule = "Slurm cannot write logs into a folder with a backslash or a line feed in its name"
        raise ConfigError([Problem("run_root", repr(str(root)), rule, "set another run_root")])
    return RunDir(root / f"{config.name}-{signature(cfg)}")


def make_folders(run: RunDir) -> None:
    """Makes the run folder and those in it. Raises RunFolderError where that cannot be."""
    try:
        for folder in (run.path, run.attempts, run.heartbeats, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"run_root={run.path.parent}: {error.filename} cannot be made: {error.strerror}. Set "
            "run_root to a folder that you can write, on a file system that all nodes share"
        ) from error


def create_run(run: RunDir, *, cfg: Any, spec: dict[str, Any], plan: dict[str, Any]) -> None:
    """Makes the folder and its inputs, or brings those of an existing one up to date.

    The inputs stay for the life of the run: a requeued job reads them again.
    """
    make_folders(run)
    write_text(run.config, OmegaConf.to_yaml(OmegaConf.create(plain_config(cfg))))
    write_json(run.spec, spec)
    write_json(run.plan, plan)


def read_run_config(run: RunDir) -> DictConfig:
    """The configuration that the run was made with. Raises RunFolderError."""
    try:
        cfg = OmegaConf.load(run.config)
    except (OSError, yaml.YAMLError) as error:
        raise RunFolderError(f"{run.config} cannot be read: {error}") from error
    if not isinstance(cfg, DictConfig):
        raise RunFolderError(f"{run.config} does not hold a configuration")
    return cfg
