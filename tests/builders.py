"""Small configurations, plans and run folders for tests."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

from slurm_pt.config import JobConfig, RunConfig, read_config, read_job_config
from slurm_pt.errors import ConfigError, Problem
from slurm_pt.files import write_json
from slurm_pt.plan import make_plan
from slurm_pt.run_dir import AttemptDir, RunDir
from slurm_pt.run_inputs import create_run, run_dir_of
from slurm_pt.submit.slurm import JobView
from slurm_pt.submit.sweep import Point

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {
    "name": "gpt",
    "run_root": "/shared/runs",
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": 256,
        "max_seq_len": 128,
    },
    "train": {"steps": 10, "global_batch_size": 16, "micro_batch_size": 2, "seq_len": 128},
    "data": {"path": None},
}


def small_config(**changes: Any) -> dict[str, Any]:
    """A valid configuration with `section__key=value` (or `key=value`) set in it."""
    config = deepcopy(SMALL)
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        (config.setdefault(section, {}) if section else config)[key] = value
    return config


def read_small(**changes: Any) -> RunConfig:
    return read_config(small_config(**changes))


def read_job(**changes: Any) -> JobConfig:
    return read_job_config(small_config(**changes))


def make_point(root: Path, **changes: Any) -> Point:
    """A planned run under `root`; nothing is written."""
    cfg = small_config(run_root=str(root), **changes)
    config = read_config(cfg)
    spec = {"entry": {"module": "nowhere", "function": "train"}, "overrides": [], "cwd": str(root)}
    return Point(run_dir_of(config, cfg), cfg, config, make_plan(config), spec)


def make_run(root: Path, entry: dict[str, str] | None = None, **changes: Any) -> RunDir:
    """A run folder as a submission leaves it, without a job."""
    point = make_point(root, **changes)
    spec = {**point.spec, "entry": entry or point.spec["entry"]}
    create_run(point.run, cfg=point.cfg, spec=spec, plan=point.plan.as_json())
    return point.run


def write_end(attempt: AttemptDir, *, outcome: str, action: str, time: float, **more: Any) -> None:
    """An attempt's end as `conclude` writes it."""
    record = {"action": action, "outcome": outcome, "reason": f"it {outcome}", "exit_code": 1}
    write_json(attempt.end, {**record, "first_step": 0, "last_step": 0, "time": time, **more})


def commit_step(run: RunDir, step: int) -> None:
    """What the names of a committed checkpoint look like."""
    folder = run.checkpoints / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text("{}")


def seen_as(state: str, key: str = "7", reason: str = "None") -> dict[str, JobView]:
    """squeue's answer about one job."""
    return {key: JobView(key, key, state, reason)}


def problems_of(**changes: Any) -> dict[str, Problem]:
    """What the door says of `small_config(**changes)`, by key; it must refuse it."""
    with pytest.raises(ConfigError) as caught:
        read_config(small_config(**changes))
    return {problem.key: problem for problem in reversed(caught.value.problems)}
