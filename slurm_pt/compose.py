"""One run from overrides alone, without a Hydra program: for `slurm-pt render` and `submit`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from slurm_pt.errors import SlurmPtError
from slurm_pt.files import read_json
from slurm_pt.launcher import make_points
from slurm_pt.program import OUR_CONFIGS, explain_hydra
from slurm_pt.run_dir import open_run
from slurm_pt.run_inputs import run_dir_of
from slurm_pt.submit.sweep import Point

OUR_TRAINER = {"module": "slurm_pt.trainer", "function": "train"}


def compose_point(
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    program: Path | None = None,
) -> Point:
    """The checked and planned run of a list of Hydra overrides. Nothing is written."""
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    place: AbstractContextManager[None]
    if config_dir is None:
        place = initialize_config_module(OUR_CONFIGS.removeprefix("pkg://"), version_base="1.3")
    else:
        place = initialize_config_dir(str(config_dir.resolve()), version_base="1.3")
    try:
        with place:
            cfg = compose(config_name, overrides=list(overrides), return_hydra_config=True)
            entry = OUR_TRAINER
            if program is not None:
                entry = {"file": str(program.resolve()), "function": "main"}
            return make_points([(cfg, overrides)], entry)[0]
    except (HydraException, OmegaConfBaseException) as error:
        raise SlurmPtError(explain_hydra(error)) from error


def reopen_point(path: Path) -> Point:
    """An existing run as it was configured, to be submitted again."""
    from omegaconf import OmegaConf

    run = open_run(path)
    spec = read_json(run.spec)
    cfg = OmegaConf.load(run.config)
    point = make_points([(cfg, spec["overrides"])], spec["entry"])[0]
    if run_dir_of(point.config, cfg).path != run.path:
        raise SlurmPtError(
            f"{run.path} was moved or its config.yaml was edited: its configuration now belongs to "
            f"{point.run.path}. Submit that configuration as a run of its own"
        )
    return point
