"""The batch script: a pure function of what is asked for."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING

import jinja2

from slurm_pt import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from slurm_pt.config import JobConfig
    from slurm_pt.plan import Plan


@dataclass(frozen=True)
class JobSpec:
    """One sbatch: runs that ask for the same, and what they ask for."""

    options: tuple[tuple[str, str | None], ...]
    """sbatch's long options; None as value writes the bare option."""
    srun_options: tuple[str, ...]
    setup: tuple[str, ...]
    """The user's shell lines before the ranks start."""
    python: str
    array_parallelism: int | None = None


def make_job_spec(config: JobConfig, plan: Plan) -> JobSpec:
    """What the configuration asks of Slurm. One form of each option; nothing that was not set."""
    slurm = config.slurm
    options: dict[str, str | None] = {"job-name": slurm.job_name or config.name}
    for key in ("partition", "qos", "account", "time", "constraint", "reservation", "nodelist"):
        _add(options, key, getattr(slurm, key))
    for key in ("exclude", "dependency", "gres", "mem", "mem_per_cpu", "mem_per_gpu"):
        _add(options, key, getattr(slurm, key))
    world = plan.layout.world_size
    options |= {"nodes": str(plan.nodes), "ntasks": str(world)}
    options["ntasks-per-node"] = str(plan.ranks_per_node)
    _add(options, "cpus_per_task", slurm.cpus_per_task)
    if plan.gpus_per_node and slurm.gres is None:
        # Per node and unbound: every rank sees its peers' devices, which NCCL needs for P2P.
        options["gpus-per-node"] = str(plan.gpus_per_node)
    if slurm.exclusive:
        options["exclusive"] = None
    options["signal"] = f"USR2@{slurm.signal_lead_s}"
    options["requeue"] = None  # never left to the site's default
    options["open-mode"] = "append"
    for name, value in slurm.additional_parameters.items():
        if value is True:
            options[name.replace("_", "-")] = None
        elif value is not False:
            _add(options, name, value)
    srun = [
        "--kill-on-bad-exit=1",
        "--distribution=block",
        f"--cpu-bind={slurm.cpu_bind}",
        "--unbuffered",
    ]
    if slurm.cpus_per_task is not None:
        # Since 22.05 srun does not inherit it from sbatch.
        srun.append(f"--cpus-per-task={slurm.cpus_per_task}")
    return JobSpec(
        options=tuple(options.items()),
        srun_options=tuple(srun),
        setup=tuple(slurm.setup),
        python=slurm.python or sys.executable,
        array_parallelism=slurm.array_parallelism,
    )


def _add(options: dict[str, str | None], key: str, value: object) -> None:
    if value is not None:
        options[key.replace("_", "-")] = str(value)


def render_script(spec: JobSpec, runs: tuple[Path, ...], *, log: Path, manifest: Path) -> str:
    """The batch script of one run, or of an array with one task for each line of `manifest`.

    `log` is the pattern of the file for what the batch shell itself prints.
    """
    if len(runs) > 1:
        limit = f"%{spec.array_parallelism}" if spec.array_parallelism else ""
        spec = replace(spec, options=(*spec.options, ("array", f"0-{len(runs) - 1}{limit}")))
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_template),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - shell, not HTML; every value passes `sh`
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["directive"] = quote_directive
    return environment.get_template("train.sbatch").render(
        spec=spec,
        options=[*spec.options, ("output", _escape_pattern(log.parent) + f"/{log.name}")],
        run=runs[0] if len(runs) == 1 else None,
        manifest=manifest,
        version=__version__,
    )


def quote_directive(value: str) -> str:
    """A value as one word of a #SBATCH line. sbatch reads those itself, without a shell.

    A backslash escapes the next sign everywhere, in single quotes too, where a shell keeps it; a
    dollar sign or a backtick is nothing special. Measured with 22.05.

    >>> print(quote_directive("it's 50% of $HOME"), quote_directive("4:00"))
    "it's 50% of $HOME" 4:00
    """
    if re.fullmatch(r"[\w@%+=:,./-]+", value, re.ASCII):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _escape_pattern(folder: Path) -> str:
    """A folder in a file name pattern of Slurm, where %j and the like stand for something."""
    return str(folder).replace("%", "%%")


def _read_template(name: str) -> str:
    return files("slurm_pt.sbatch_templates").joinpath(name).read_text(encoding="utf-8")
