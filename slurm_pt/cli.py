"""The command line. Each command imports what it needs when it runs: `--help` must be quick."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from slurm_pt import __version__
from slurm_pt.errors import SlurmPtError


class _Group(click.Group):
    """Prints the errors a user can mend as one message, with exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SlurmPtError as error:
            click.echo(f"slurm-pt: {error}", err=True)
            ctx.exit(error.exit_code)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "devcluster":
            from slurm_pt.devcluster.commands import devcluster

            return devcluster
        if name == "convert":
            from slurm_pt.cli_convert import convert

            return convert
        return super().get_command(ctx, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "devcluster", "convert"])


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slurm-pt")
def main() -> None:
    """Model-parallel training jobs on Slurm: submit, watch, cancel."""


def _one_run(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments from which one run is composed."""
    for option in (
        click.option(
            "--program",
            type=click.Path(path_type=Path, exists=True),
            help="A file with a function main(cfg); --config-dir and --config-name say where its "
            "config is. Default: our trainer.",
        ),
        click.option("--config-name", default="config", show_default=True),
        click.option(
            "--config-dir", type=click.Path(path_type=Path, exists=True), help="Your own configs."
        ),
        click.argument("overrides", nargs=-1),
    ):
        command = option(command)
    return command


_RUNS = click.argument("places", nargs=-1, type=click.Path(path_type=Path))


@main.command()
@_RUNS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, a record for each run.")
@click.option("--watch", "watching", is_flag=True, help="A live table until all runs have ended.")
@click.option(
    "--max-age",
    type=float,
    default=2.0,
    show_default=True,
    help="Seconds that an answer of squeue is used again.",
)
def status(places: tuple[Path, ...], as_json: bool, watching: bool, max_age: float) -> None:
    """Show the state and progress of runs.

    PLACES are runs, sweep folders or folders of runs (default: ./runs).
    """
    from rich.console import Console

    from slurm_pt.monitor.squeue_cache import ask_squeue
    from slurm_pt.monitor.status import find_runs, read_status, with_accounting
    from slurm_pt.monitor.table import render_table
    from slurm_pt.submit.slurm import SlurmClient

    runs = find_runs(places or (Path("runs"),))
    console = Console()
    if watching:
        from slurm_pt.monitor.watch import watch

        client = SlurmClient()
        watch(runs, client=client if client.is_available() else None, poll_s=30, console=console)
        return
    answer = ask_squeue(max_age_s=max_age)
    jobs = answer.jobs if answer.jobs is None else with_accounting(runs, answer.jobs, SlurmClient())
    rows = [read_status(run, jobs) for run in runs]
    if as_json:
        click.echo(json.dumps([row.as_json() for row in rows], indent=1))
    elif not rows:
        console.print(f"no runs in {', '.join(map(str, places or (Path('runs'),)))}")
    else:
        console.print(render_table(rows, note=answer.note))


@main.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--rank", type=int, help="Only this rank (default: rank 0).")
@click.option("--all-ranks", is_flag=True, help="Every rank, with its number before each line.")
@click.option("--attempt", type=int, help="Which attempt (default: the newest).")
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows, into later attempts.")
def logs(
    run_path: Path, rank: int | None, all_ranks: bool, attempt: int | None, follow: bool
) -> None:
    """Show what the ranks of RUN printed."""
    from slurm_pt.monitor.logs import show_logs
    from slurm_pt.run_dir import open_run

    ranks = None if all_ranks else (rank or 0)
    show_logs(open_run(run_path), rank=ranks, attempt=attempt, follow=follow, out=sys.stdout)


@main.command()
@click.argument("places", nargs=-1, required=True, type=click.Path(path_type=Path))
def cancel(places: tuple[Path, ...]) -> None:
    """End runs, waiting or running, for good. PLACES are runs or sweep folders."""
    from slurm_pt.monitor.status import find_runs
    from slurm_pt.submit.cancel import cancel_run
    from slurm_pt.submit.slurm import SlurmClient

    client = SlurmClient()
    for run in find_runs(places):
        click.echo(f"{run.name}: {cancel_run(run, client)}")


@main.command()
@_one_run
def render(
    overrides: tuple[str, ...], config_dir: Path | None, config_name: str, program: Path | None
) -> None:
    """Prepare a run and print its batch script; plain `sbatch` takes it.

    OVERRIDES are Hydra's: train.lr=1e-3 parallel.tp=2 slurm.partition=main
    """
    from slurm_pt.compose import compose_point
    from slurm_pt.run_inputs import create_run
    from slurm_pt.submit.script import make_job_spec, render_script

    point = compose_point(
        overrides, config_dir=config_dir, config_name=config_name, program=program
    )
    create_run(point.run, cfg=point.cfg, spec=point.spec, plan=point.plan.as_json())
    spec = make_job_spec(point.config, point.plan)
    log = point.run.path / "slurm-%j.out"
    text = render_script(spec, (point.run.path,), log=log, manifest=point.run.path / "runs.txt")
    click.echo(text, nl=False)
    click.echo(f"run folder: {point.run.path}", err=True)


@main.command()
@_one_run
@click.option(
    "--run", "run_path", type=click.Path(path_type=Path), help="Submit this existing run again."
)
def submit(
    overrides: tuple[str, ...],
    run_path: Path | None,
    config_dir: Path | None,
    config_name: str,
    program: Path | None,
) -> None:
    """Submit one run and return at once. OVERRIDES are Hydra's."""
    from rich.console import Console

    from slurm_pt.compose import compose_point, reopen_point
    from slurm_pt.launcher import announce, ask_for_jobs, available_client
    from slurm_pt.submit.sweep import submit_points

    if run_path is not None:
        point = reopen_point(run_path)
    else:
        point = compose_point(
            overrides, config_dir=config_dir, config_name=config_name, program=program
        )
    client = available_client()
    submitted = submit_points([point], client=client, jobs=ask_for_jobs(client))
    announce(Console(stderr=True), submitted, [point])
    click.echo(point.run.path)


@main.group()
def data() -> None:
    """Token files for training."""


@data.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A Hugging Face tokenizers JSON; default: one token a byte.",
)
def prepare(paths: tuple[Path, ...], out: Path, tokenizer: Path | None) -> None:
    """Make token files from text files and folders."""
    from slurm_pt.training.corpus import prepare as prepare_tokens

    made = prepare_tokens(paths, out, tokenizer)
    is_there = "" if made.created else " (was there already, unchanged)"
    click.echo(f"{made.num_tokens:,} tokens from {made.documents} files in {made.folder}{is_there}")
    vocabulary = "" if tokenizer is None else f" model.vocab_size={made.vocab_size}"
    click.echo(f"Train on them: python train.py data=tokens data.path={made.folder}{vocabulary}")


@main.command()
@click.option("--keep", is_flag=True, help="Leave the development cluster and the runs.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the runs go.")
def demo(keep: bool, folder: Path | None) -> None:
    """Preempt a real Slurm job on this machine and watch it come back, bit for bit."""
    from slurm_pt.demo import run_demo

    sys.exit(run_demo(folder=folder, keep=keep))


if __name__ == "__main__":
    main()
