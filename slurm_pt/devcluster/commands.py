"""`slurm-pt devcluster up | down | status | env | install`."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import click

from slurm_pt.devcluster.cluster import ClusterStatus, DevCluster
from slurm_pt.devcluster.config import DevClusterConfig
from slurm_pt.devcluster.environment import render_shell
from slurm_pt.devcluster.install import install_packages
from slurm_pt.devcluster.paths import FOLDER_VARIABLE, default_folder, paths_in
from slurm_pt.devcluster.state import require_state

_DEFAULTS = DevClusterConfig()

_folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar=FOLDER_VARIABLE,
    default=default_folder,
    help=f"The cluster's folder. [env: {FOLDER_VARIABLE}; default: one per user]",
)


@click.group()
def devcluster() -> None:
    """A real Slurm of several nodes on this machine, beside any other and in one folder."""


@devcluster.command()
@_folder_option
@click.option("--nodes", type=int, default=_DEFAULTS.nodes, show_default=True)
@click.option(
    "--cpus",
    "cpus_per_node",
    type=int,
    default=_DEFAULTS.cpus_per_node,
    show_default=True,
    help="CPUs of each node; may be more than there are.",
)
@click.option(
    "--memory",
    "memory_mib",
    type=int,
    default=_DEFAULTS.memory_mib,
    show_default=True,
    help="MiB of each node.",
)
@click.option(
    "--gpus",
    "gpus_per_node",
    type=int,
    default=_DEFAULTS.gpus_per_node,
    show_default=True,
    help="Pretend GPUs of each node.",
)
@click.option("--gpu-type", default=_DEFAULTS.gpu_type, show_default=True)
@click.option(
    "--preempt-type",
    type=click.Choice(["qos", "partition"]),
    default=_DEFAULTS.preempt_type,
    show_default=True,
    help="What makes a job high or low.",
)
@click.option(
    "--preempt-mode",
    type=click.Choice(["requeue", "cancel"]),
    default=_DEFAULTS.preempt_mode,
    show_default=True,
)
@click.option(
    "--grace-time",
    "grace_time_s",
    type=int,
    default=_DEFAULTS.grace_time_s,
    show_default=True,
    help="Seconds from a preemption's warning to its end.",
)
@click.option(
    "--kill-wait",
    "kill_wait_s",
    type=int,
    default=_DEFAULTS.kill_wait_s,
    show_default=True,
    help="Seconds from TERM to KILL.",
)
@click.option(
    "--send-user-signal",
    is_flag=True,
    help="At a preemption, send the signal of --signal instead of TERM.",
)
@click.option(
    "--accounting/--no-accounting",
    default=_DEFAULTS.accounting,
    show_default=True,
    help="With a database: QoS, sacct, limits.",
)
@click.option(
    "--account",
    "accounts",
    multiple=True,
    default=_DEFAULTS.accounts,
    show_default=True,
    help="May be given several times; the first is the default one.",
)
@click.option(
    "--user",
    "users",
    multiple=True,
    help="Admit one more user of this machine. May be given several times.",
)
@click.option(
    "--default-time", default=_DEFAULTS.default_time, help="Time limit of jobs that name none."
)
@click.option(
    "--min-job-age",
    "min_job_age_s",
    type=int,
    default=_DEFAULTS.min_job_age_s,
    show_default=True,
    help="Seconds for which squeue remembers an ended job.",
)
@click.option("--max-array-size", type=int, default=_DEFAULTS.max_array_size, show_default=True)
@click.option(
    "--slurm-conf",
    "extra_slurm_conf",
    multiple=True,
    metavar="LINE",
    help="A line for slurm.conf, in place of ours for the same key. May be given several times.",
)
def up(folder: Path, **options: Any) -> None:
    """Start a cluster, and wait until its nodes are idle."""
    begin = time.monotonic()
    DevCluster(folder).up(DevClusterConfig(**options))
    click.echo(
        f"{options['nodes']} nodes are idle after {time.monotonic() - begin:.1f} s. To use them:"
    )
    named = "" if folder == default_folder() else f" --folder {folder}"
    click.echo(f'  eval "$(slurm-pt devcluster env{named})"')


@devcluster.command()
@_folder_option
def down(folder: Path) -> None:
    """End the cluster with all its jobs, and remove its folder."""
    cluster = DevCluster(folder)
    if cluster.down():
        click.echo(f"The cluster in {cluster.folder} is gone.")
    else:
        click.echo(f"There is no cluster in {cluster.folder}.")


@devcluster.command()
@_folder_option
@click.option("--json", "as_json", is_flag=True, help="Print it for a program to read.")
def status(folder: Path, as_json: bool) -> None:
    """Say which daemons run and how the nodes are; exit code 1 if anything is amiss."""
    cluster_status = DevCluster(folder).status()
    if as_json:
        content = dataclasses.asdict(cluster_status)
        click.echo(json.dumps({**content, "whole": cluster_status.is_whole}, default=str, indent=2))
    else:
        click.echo(render_status(cluster_status))
    if not cluster_status.is_whole:
        raise click.exceptions.Exit(1)


def render_status(status: ClusterStatus) -> str:
    """The status as a short text for people."""
    lines = [f"Slurm {status.slurm_version} in {status.folder}"]
    lines += [
        f"  {role:<12} {'ended' if pid is None else f'pid {pid}'}"
        for role, pid in status.daemons.items()
    ]
    lines += [f"  {node.name:<12} {node.state} {node.reason}".rstrip() for node in status.nodes]
    if not status.nodes:
        lines.append("  the controller does not answer")
    return "\n".join(lines)


@devcluster.command()
@_folder_option
def env(folder: Path) -> None:
    """Print what points a shell at the cluster, for: eval "$(slurm-pt devcluster env)"."""
    paths = paths_in(folder)
    require_state(paths)
    click.echo(render_shell(paths, os.environ), nl=False)


@devcluster.command()
def install() -> None:
    """Install Slurm and what it needs from Debian's packages; starts no service."""
    installed = install_packages()
    click.echo(f"Installed {' '.join(installed)}." if installed else "All packages are there.")
