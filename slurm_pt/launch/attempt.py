"""The beginning and the end of an attempt, as the batch script calls them.

`python -m slurm_pt.launch.attempt begin RUN` prints the folder of the new attempt (nothing if the
run is finished); `... end ATTEMPT --srun-code N` decides what follows, does it, and exits with the
code that the batch script is to end with.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click

from slurm_pt.config import JobConfig, read_job_config
from slurm_pt.errors import RunFolderError, SlurmPtError, SlurmUnavailableError, SubmitError
from slurm_pt.files import find_json, read_json, write_json
from slurm_pt.launch.after_attempt import (
    WANTS_REQUEUE,
    Decision,
    ExitRecord,
    Outcome,
    PastAttempt,
    decide,
)
from slurm_pt.launch.preemption import StopCause, stop_cause
from slurm_pt.owner import release_ownership, take_ownership, this_process
from slurm_pt.plan import Plan
from slurm_pt.run_dir import AttemptDir, RunDir, open_run
from slurm_pt.run_inputs import read_run_config
from slurm_pt.submit.environment import slurm_job_key, slurm_requeue_key
from slurm_pt.submit.slurm import SlurmClient

REQUEUE_PAUSES_S = (1, 2, 4, 8, 15, 30, 60, 60, 60, 60)
"""Five minutes: a controller that is restarted comes back within that."""


def begin_attempt(run: RunDir, *, pid: int | None = None) -> AttemptDir | None:
    """The folder of a new attempt, owned by this job; None if the run is finished.

    `pid` is the process that lives as long as the attempt (default: this one).

    Safe to repeat after a kill at any moment: what an earlier try left is passed over.
    Raises RunFolderError while another writer lives.
    """
    if run.done.exists():
        return None
    job_key = slurm_job_key(os.environ)
    restart_count = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    owner = this_process(job_key=job_key, restart_count=restart_count, pid=pid)
    take_ownership(run, owner, job_is_running=SlurmClient().job_is_running)
    attempt = run.new_attempt()
    record = {
        "owner": dataclasses.asdict(owner),
        "nodes": os.environ.get("SLURM_JOB_NODELIST", ""),
        "time": owner.time,
        "first_step": run.committed_step(),
    }
    write_json(attempt.begin, record)
    run.record_event(
        "attempt_began", attempt=attempt.number, job_key=job_key, nodes=record["nodes"]
    )
    return attempt


def read_config_of(run: RunDir) -> JobConfig:
    """The job part of the configuration that a run was made with."""
    return read_job_config(read_run_config(run))


def end_attempt(attempt: AttemptDir, *, srun_code: int, cause: StopCause) -> Decision:
    """How an attempt ended and what is to follow; the caller puts it on record and does it."""
    run = RunDir(attempt.path.parent.parent)
    begin = read_json(attempt.begin)
    plan = Plan.from_json(read_json(run.plan))
    progress = (int(begin["first_step"]), run.committed_step())
    srun_said = attempt.srun_log.read_text(errors="replace") if attempt.srun_log.exists() else ""
    return decide(
        records=read_exit_records(attempt),
        world_size=plan.layout.world_size,
        srun_code=srun_code,
        srun_said=srun_said,
        cause=cause,
        progress=progress,
        history=_history(run, before=attempt.number),
        max_failures=read_config_of(run).slurm.max_failures,
    )


def conclude(attempt: AttemptDir, decision: Decision) -> None:
    """Puts a decision on record and lets the next writer in."""
    run = RunDir(attempt.path.parent.parent)
    begin = read_json(attempt.begin)
    steps = {"first_step": begin["first_step"], "last_step": run.committed_step()}
    write_json(attempt.end, {**decision.as_json(), **steps, "time": time.time()})
    run.record_event("attempt_ended", attempt=attempt.number, **decision.as_json(), **steps)
    release_ownership(run, begin["owner"]["nonce"])


def read_exit_records(attempt: AttemptDir) -> list[ExitRecord]:
    """The records that the ranks left, in rank order."""
    records: list[dict[str, Any]] = [
        read_json(path) for path in sorted(attempt.exits.glob("rank_*.json"))
    ]
    return [ExitRecord(**record) for record in records]


def _history(run: RunDir, *, before: int) -> list[PastAttempt]:
    past = []
    for attempt in run.list_attempts():
        if attempt.number >= before:
            break
        end = find_json(attempt.end)
        if end is None:  # killed before it could write: Slurm ended the whole job
            continue
        past.append(PastAttempt(Outcome(end["outcome"]), end["first_step"], end["last_step"]))
    return past


# ------------------------------------------------------------------- called by the batch script


def _end_in_slurm(attempt: AttemptDir, srun_code: int) -> int:
    client = SlurmClient()
    job_key = slurm_requeue_key(os.environ)
    run = RunDir(attempt.path.parent.parent)
    cause = StopCause.unknown
    if srun_code != 0 and job_key is not None:
        cause = _ask_for_cause(client, job_key, read_config_of(run).slurm.signal_lead_s)
    decision = end_attempt(attempt, srun_code=srun_code, cause=cause)
    try:
        conclude(attempt, decision)
    except (OSError, RunFolderError) as error:  # a full disk must not keep the job from going on
        click.echo(f"slurm_pt: the end of this attempt is not on record: {error}", err=True)
    click.echo(f"slurm_pt: {decision.outcome.value}: {decision.reason}", err=True)
    if decision.action != "requeue" or job_key is None:
        return decision.exit_code
    try:
        _requeue(client, job_key)
    except SubmitError as error:
        reason = (
            f"{decision.reason}; {error}. Start it again with `slurm-pt submit --run {run.path}`"
        )
        stopped = dataclasses.replace(decision, action="stop", reason=reason)
        write_json(attempt.end, {**read_json(attempt.end), **stopped.as_json()})
        run.record_event("requeue_refused", attempt=attempt.number, reason=str(error))
        click.echo(f"slurm_pt: {reason}", err=True)
    return decision.exit_code or WANTS_REQUEUE


def _requeue(client: SlurmClient, job_key: str) -> None:
    """Puts the job back into the queue; while the controller is away it is asked again."""
    for pause_s in REQUEUE_PAUSES_S:
        try:
            return client.requeue(job_key)
        except SlurmUnavailableError as error:
            click.echo(f"slurm_pt: {error}; asking again in {pause_s} s", err=True)
            time.sleep(pause_s)
    return client.requeue(job_key)


def _ask_for_cause(client: SlurmClient, job_key: str, signal_lead_s: float) -> StopCause:
    try:
        view = client.query_stop(job_key)
    except SubmitError:
        return StopCause.unknown
    return stop_cause(view, now=time.time(), signal_lead_s=signal_lead_s)


@click.group()
def cli() -> None:
    """The two ends of an attempt; called by the batch script."""


@cli.command()
@click.argument("run_path", type=click.Path(path_type=Path))
@click.option("--pid", type=int, default=os.getppid, help="The batch shell.")
def begin(run_path: Path, pid: int) -> None:
    """Take the run folder and print the new attempt's folder."""
    run = open_run(run_path)
    attempt = begin_attempt(run, pid=pid)
    if attempt is None:
        return
    if slurm_requeue_key(os.environ) is not None and shutil.which("scontrol") is None:
        reason = (
            "scontrol is not on this node's PATH, so a preempted job cannot put itself back into "
            "the queue. Set slurm.setup to a line that brings it (module load slurm), or after a "
            f"preemption give `slurm-pt submit --run {run.path}`"
        )
        run.record_event("requeue_impossible", attempt=attempt.number, reason=reason)
        click.echo(f"slurm_pt: {reason}", err=True)
    click.echo(attempt.path)


@cli.command()
@click.argument("attempt_path", type=click.Path(path_type=Path))
@click.option("--srun-code", type=int, required=True)
def end(attempt_path: Path, srun_code: int) -> None:
    """Decide what follows an attempt, and do it."""
    sys.exit(_end_in_slurm(AttemptDir(attempt_path), srun_code))


def main() -> None:
    """Runs one of the two commands. What a user can mend is one line, and exit code 2."""
    try:
        cli(standalone_mode=False)
    except SlurmPtError as error:
        click.echo(f"slurm_pt: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
