"""What the machine decides about a cluster: names, user, free ports, Slurm's version."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
from typing import TYPE_CHECKING

from slurm_pt.devcluster.install import find_program
from slurm_pt.devcluster.ports import find_free_ports
from slurm_pt.devcluster.render import Site
from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from slurm_pt.devcluster.config import DevClusterConfig

# Gives a process a host name and an /etc/hosts of its own, then becomes the command that follows:
# the pid stays. Mounts that the machine makes later still show up inside.
ENTER_NODE = (
    "unshare",
    "--uts",
    "--mount",
    "--propagation=slave",
    "/bin/sh",
    "-c",
    # Not every system has `hostname`, and not every one lets us write to /proc/sys.
    '{ hostname "$1" 2>/dev/null || echo "$1" >/proc/sys/kernel/hostname; }'
    ' && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"',
    "sh",
)


def inspect_site(config: DevClusterConfig) -> Site:
    """What this machine decides about a new cluster."""
    controller, database, *nodes = find_free_ports(2 + config.nodes)
    hostname = socket.gethostname()
    return Site(
        hostname=hostname.partition(".")[0],
        user=_current_user(),
        controller_port=controller,
        database_port=database,
        node_ports=tuple(nodes),
        slurm_version=_query_slurm_version(),
        node_hostnames=config.node_hostnames and _machine_allows_hostnames(),
    )


def _current_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError as error:
        raise DevClusterError(
            f"user id {os.geteuid()} has no name on this machine, but Slurm wants one. "
            f"To fix: run as a user that /etc/passwd knows."
        ) from error


def _machine_allows_hostnames() -> bool:
    """Whether processes may get host names of their own: not for ordinary users."""
    command = [*ENTER_NODE, "n1", "/etc/hosts", "true"]
    try:
        tried = subprocess.run(command, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def _query_slurm_version() -> str:
    """The version of the installed Slurm, such as 22.05.8."""
    command = [find_program("slurmctld") or "slurmctld", "-V"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return asked.stdout.strip().rpartition(" ")[2] or "unknown"
