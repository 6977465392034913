"""What a Hydra sweep does: check every point, submit what is missing, watch, say how it went."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from rich.console import Console

from slurm_pt.config import read_config, read_job_config
from slurm_pt.config.slurm_values import (
    parse_memory_mib,
    parse_time_limit_s,
    render_duration,
)
from slurm_pt.errors import ConfigError, SlurmPtError, SlurmUnavailableError
from slurm_pt.files import find_json
from slurm_pt.monitor.status import RunStatus
from slurm_pt.monitor.watch import watch
from slurm_pt.plan import make_plan
from slurm_pt.run_dir import RunDir
from slurm_pt.run_inputs import run_dir_of
from slurm_pt.submit.run_state import RunPhase
from slurm_pt.submit.slurm import SlurmClient
from slurm_pt.submit.sweep import Point, Submitted, submit_points


class PendingJobReturn(JobReturn):
    """A run that was submitted and has not ended: its status is unknown, it has no value yet."""

    @property
    def return_value(self) -> Any:
        return None

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


def launch_points(
    composed: Sequence[tuple[Any, Sequence[str]]],
    program: Callable[[Any], Any],
    *,
    wait: bool,
    local: bool,
) -> list[JobReturn]:
    """Submits a sweep's points; what became of each, in their order."""
    entry = entry_of(program)
    points = make_points(composed, entry)
    client = None if local else available_client()
    console = Console(stderr=True)
    if client is None:
        console.print(
            "No Slurm here: the runs start as processes of this machine, one after another."
        )
    submitted = submit_points(points, client=client, jobs=ask_for_jobs(client))
    announce(console, submitted, points)
    runs = [point.run for point in points]
    if not wait:
        return [
            _pending(cfg, overrides, run)
            for (cfg, overrides), run in zip(composed, runs, strict=True)
        ]
    statuses = watch(runs, client=client, poll_s=points[0].config.monitor.poll_s, console=console)
    if statuses is None:  # Ctrl-C
        place = submitted.folder or points[0].run.path.parent
        back = f"Detached; the jobs go on. Come back with: slurm-pt status --watch {place}"
        console.print(back, soft_wrap=True, highlight=False)
        return [
            _pending(cfg, overrides, run)
            for (cfg, overrides), run in zip(composed, runs, strict=True)
        ]
    return [
        _ended(cfg, overrides, status)
        for (cfg, overrides), status in zip(composed, statuses, strict=True)
    ]


def entry_of(program: Callable[[Any], Any]) -> dict[str, str]:
    """Where a rank finds the program again: a file, and the name of a function in it."""
    function = inspect.unwrap(program)
    name = function.__qualname__
    if "." in name or name == "<lambda>":
        raise SlurmPtError(
            f"the program {name} is not a function at the top level of its file, so a rank cannot "
            "find it again. Move it there"
        )
    return {"file": str(Path(inspect.getfile(function)).resolve()), "function": name}


def make_points(
    composed: Sequence[tuple[Any, Sequence[str]]], entry: dict[str, str]
) -> list[Point]:
    """Checks and plans every point. Raises ConfigError with the problems of all of them."""
    points, problems = [], []
    for number, (cfg, overrides) in enumerate(composed):
        if "hydra" in cfg:  # for ${hydra:...} in the user's values
            HydraConfig.instance().set_config(cfg)
        try:
            read = read_config if "model" in cfg and "train" in cfg else read_job_config
            config = read(cfg)
            plan = make_plan(config)
        except ConfigError as error:
            if len(composed) == 1:
                raise
            problems.append(f"point {number} ({' '.join(overrides)}): {error}")
            continue
        spec = {"entry": entry, "overrides": list(overrides), "cwd": str(Path.cwd())}
        points.append(Point(run_dir_of(config, cfg), cfg, config, plan, spec))
    if problems:
        lines = "\n".join(problems)
        raise SlurmPtError(
            f"nothing was submitted; {len(problems)} of {len(composed)} points:\n{lines}"
        )
    return points


def available_client() -> SlurmClient | None:
    """Slurm, where there is one."""
    client = SlurmClient()
    return client if client.is_available() else None


def ask_for_jobs(client: SlurmClient | None) -> Any:
    """What Slurm knows of the user's jobs; nothing is submitted on top of no answer."""
    if client is None:
        return None
    try:
        return client.query_my_jobs()
    except SlurmUnavailableError as error:
        raise SlurmUnavailableError(
            f"{error}. Nothing was submitted: without its answer a run could be started twice"
        ) from error


def announce(console: Console, submitted: Submitted, points: Sequence[Point]) -> None:
    """One line for what was submitted and one for what was left alone."""
    total = len(points)
    if submitted.new:
        keys = [(find_json(run.job) or {}).get("job_key") for run in submitted.new]
        known = [key for key in keys if key]
        ids = ", ".join(dict.fromkeys(key.split("_")[0] for key in known))
        which = f" as job {ids}" if ids else " as local processes"
        console.print(f"{len(submitted.new)} of {total} runs submitted{which}; scripts and logs in")
        console.print(f"  {submitted.folder}", soft_wrap=True, highlight=False)
        for line in dict.fromkeys(render_request(point) for point in points):
            console.print(line, highlight=False)
    for run, state in submitted.already:
        console.print(f"{run.name}: {state.phase.value}, left alone", highlight=False)


def render_request(point: Point) -> str:
    """What a run asks for, in words: Slurm reads 4:00 as four minutes, and a bare 64 as 64 MB."""
    plan, slurm = point.plan, point.config.slurm
    layout = plan.layout
    words = [
        f"each on {plan.nodes} node{'s' if plan.nodes > 1 else ''} x {plan.ranks_per_node} ranks"
        f" (tp {layout.tp} x pp {layout.pp} x dp {layout.dp})"
    ]
    if slurm.time is not None:
        words.append(f"time limit {render_duration(parse_time_limit_s(slurm.time))}")
    for key in ("mem", "mem_per_cpu", "mem_per_gpu"):
        text = getattr(slurm, key)
        if text is not None:
            mib = parse_memory_mib(text)
            amount = f"{mib} MiB" if mib else "all of the node's memory"
            words.append(amount + {"mem": " per node"}.get(key, f" {key[4:].replace('_', ' ')}"))
    return ", ".join(words)


def _job_return(cls: type[JobReturn], cfg: Any, overrides: Sequence[str], run: RunDir) -> JobReturn:
    return cls(
        overrides=list(overrides),
        cfg=cfg,
        hydra_cfg=cfg,
        working_dir=str(run.path),
        task_name=run.name,
    )


def _pending(cfg: Any, overrides: Sequence[str], run: RunDir) -> JobReturn:
    return _job_return(PendingJobReturn, cfg, overrides, run)  # its status is UNKNOWN


def _ended(cfg: Any, overrides: Sequence[str], status: RunStatus) -> JobReturn:
    job = _job_return(JobReturn, cfg, overrides, status.run)
    if status.state.phase is RunPhase.finished:
        job.status = JobStatus.COMPLETED
        done = find_json(status.run.done) or {}
        job.return_value = done.get("result", done)
    else:
        job.status = JobStatus.FAILED
        job.return_value = RunFailedError(f"{status.run.path}: {status.state.reason}")
    return job


class RunFailedError(SlurmPtError):
    """A run of the sweep ended without finishing; the table says which and why."""

    exit_code = 1
