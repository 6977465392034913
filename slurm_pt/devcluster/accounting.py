"""Filling the accounting database: cluster, QoS, accounts and users."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from slurm_pt.devcluster.render import CLUSTER_NAME
from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slurm_pt.devcluster.config import DevClusterConfig


def render_setup(config: DevClusterConfig, starter: str) -> list[str]:
    """The sacctmgr commands for a new database, in an order in which each finds what it names."""
    users = admitted_users(config, starter)
    return [
        "add qos low,high",
        f"modify qos low set PreemptMode={config.preempt_mode} GraceTime={config.grace_time_s}",
        "modify qos high set Preempt=low Priority=100",
        "modify qos normal set Priority=50",
        # Accounts and users that are added later inherit the QoS from the cluster.
        f"add cluster {CLUSTER_NAME} qos=low,normal,high defaultqos=normal",
        f"add account {','.join(config.accounts)}",
        f"add user {','.join(users)} account={','.join(config.accounts)}"
        f" defaultaccount={config.accounts[0]}",
        # Root is there from the start, with an account of its own as default.
        f"modify user root set defaultaccount={config.accounts[0]}",
    ]


def admitted_users(config: DevClusterConfig, starter: str) -> tuple[str, ...]:
    """Root, whoever starts the cluster, and those that the configuration names; each once."""
    return tuple(dict.fromkeys(["root", starter, *config.users]))


def run_sacctmgr(commands: Sequence[str], *, environment: Mapping[str, str]) -> None:
    """Runs the commands in one session: each of its own would take half a second longer."""
    done = subprocess.run(
        ["sacctmgr", "--immediate"],
        input="\n".join([*commands, ""]),
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        complaint = done.stderr.strip() or done.stdout.strip()
        raise DevClusterError(
            f"sacctmgr refused one of: {'; '.join(commands)}. It says: {complaint}. "
            f"To fix: the account or user that it names."
        )
