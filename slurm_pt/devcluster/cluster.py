"""DevCluster: a real Slurm of several node daemons on one machine, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_pt.devcluster.accounting import admitted_users, render_setup, run_sacctmgr
from slurm_pt.devcluster.config import DevClusterConfig
from slurm_pt.devcluster.daemons import (
    create_database,
    explain,
    find_daemon,
    start_role,
    wait_for_port,
    wait_for_role,
)
from slurm_pt.devcluster.deadlines import wait_until
from slurm_pt.devcluster.environment import cluster_environment
from slurm_pt.devcluster.files import claim_folder, write_files
from slurm_pt.devcluster.install import require_packages
from slurm_pt.devcluster.paths import default_folder, paths_in
from slurm_pt.devcluster.ports import is_greeted_at
from slurm_pt.devcluster.processes import (
    Process,
    end_processes,
    node_namespaces,
    read_processes,
    select_cluster,
    send_signal,
)
from slurm_pt.devcluster.site import inspect_site
from slurm_pt.devcluster.state import ClusterState, read_state, require_state, write_state
from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_READY_TIMEOUT_S = 120.0
_STARTERS = ("slurmctld", "slurmd-")


@dataclass(frozen=True)
class NodeStatus:
    """One node as the controller sees it."""

    name: str
    state: str
    reason: str
    """Why it is down or drained; empty otherwise."""


@dataclass(frozen=True)
class ClusterStatus:
    """What is there of a cluster."""

    folder: Path
    slurm_version: str
    daemons: dict[str, int | None]
    """Role to pid; None for a daemon that has ended."""
    nodes: tuple[NodeStatus, ...]
    """Empty while the controller does not answer."""

    @property
    def is_whole(self) -> bool:
        """Whether every daemon runs and the controller answers."""
        return None not in self.daemons.values() and bool(self.nodes)


class DevCluster:
    """The cluster in `folder`. Holds nothing in memory: another process may go on with it."""

    def __init__(self, folder: Path | str | None = None):
        self._paths = paths_in(default_folder() if folder is None else folder)

    @property
    def folder(self) -> Path:
        """The cluster's folder, as an absolute path."""
        return self._paths.folder

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF must name for a Slurm command to reach this cluster."""
        return self._paths.slurm_conf

    @property
    def config(self) -> DevClusterConfig:
        """The options that the cluster was started with."""
        return require_state(self._paths).config

    @property
    def exists(self) -> bool:
        """Whether a cluster was started in the folder and not taken down, whole or not."""
        return read_state(self._paths) is not None

    def up(self, config: DevClusterConfig | None = None) -> None:
        """Starts the cluster; returns when all nodes are idle. What fails leaves nothing behind."""
        require_packages()
        state = read_state(self._paths)
        if state is not None:
            if self._finder()():
                raise DevClusterError(
                    f"a cluster of {state.config.nodes} nodes runs in folder={self.folder} "
                    f"already. To fix: use it, take it down first, or name another --folder."
                )
            self._erase()
        claim_folder(self.folder)
        try:
            self._start(config or DevClusterConfig())
        except BaseException:
            self._erase()
            raise

    def down(self) -> bool:
        """Ends every process of the cluster and removes its folder; whether there was one."""
        if not self.exists:
            return False
        self._erase()
        return True

    def status(self) -> ClusterStatus:
        """Which daemons run, and what the controller says about the nodes."""
        state = require_state(self._paths)
        found = {role: find_daemon(self._paths, role) for role in state.pids}
        return ClusterStatus(
            folder=self.folder,
            slurm_version=state.site.slurm_version,
            daemons={role: daemon.pid if daemon else None for role, daemon in found.items()},
            nodes=self._query_nodes() if found.get("slurmctld") else (),
        )

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """A whole environment for a subprocess: `base`, or ours, pointed at this cluster."""
        require_state(self._paths)
        return cluster_environment(self._paths, os.environ if base is None else base)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = 60.0,
        check: bool = True,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command against this cluster, with its output as text; raises if it fails."""
        return subprocess.run(
            list(command),
            env={**self.environment(), **(variables or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=check,
        )

    def add_account(self, name: str) -> None:
        """Adds an account with every QoS, for the same users as the others."""
        config = self.config
        users = ",".join(admitted_users(config, require_state(self._paths).site.user))
        self._sacctmgr([f"add account {name}", f"add user {users} account={name}"])

    def add_user(self, name: str) -> None:
        """Admits one more user of this machine, to the first account and with every QoS."""
        self._sacctmgr([f"add user {name} account={self.config.accounts[0]}"])

    def stop_controller(self, *, kill: bool = False) -> None:
        """Ends slurmctld and nothing else: orderly, or as a crash would."""
        self._end_daemon("slurmctld", kill=kill)

    def start_controller(self) -> None:
        """Starts slurmctld again with the state that it left; returns when it answers."""
        self._refuse_if_running("slurmctld")
        start_role(self._paths, "slurmctld")
        wait_for_port(self._paths, "slurmctld")
        wait_for_role(self._paths, "slurmctld", lambda: bool(self._query_nodes()))

    def kill_node(self, name: str, *, noticed: bool = False) -> None:
        """Ends the node's daemon and all that runs on the node at once, as a power cut would.

        Left to itself the controller notices after SlurmdTimeout (60 s): the node is down, its jobs
        are requeued. With `noticed` that happens at once.
        """
        self._require_node(name)
        find = self._finder(name)
        # The keepers of the steps first: one that outlives its tasks reports them as failed.
        end_processes(lambda: [p for p in find() if p.is_on_node])
        end_processes(find)
        if noticed:
            reason = "Reason=Not responding"
            self.run(["scontrol", "update", f"NodeName={name}", "State=DOWN", reason])

    def start_node(self, name: str) -> None:
        """Starts the node's daemon again, as after a boot; returns when the node counts as up.

        Jobs that the controller still believes to run there are only then found missing, and
        requeued, if they were older than about 25 s; younger ones stay as ghosts. Wait until the
        node is down, or let `kill_node` have it noticed, to see them requeued.
        """
        self._require_node(name)
        self._refuse_if_running(f"slurmd-{name}")
        # -b: without it Slurm knows from the machine's uptime that there was no boot, and drops
        # the jobs (NODE_FAIL) where it would requeue them on a real cluster.
        start_role(self._paths, f"slurmd-{name}", "-b")
        wait_for_port(self._paths, f"slurmd-{name}")
        wait_for_role(self._paths, f"slurmd-{name}", lambda: self._nodes_are_up((name,)))

    def _start(self, config: DevClusterConfig) -> None:
        state = ClusterState(config, inspect_site(config))
        # First of all, so that `down` finds even what is only half there.
        write_state(self._paths, state)
        write_files(self._paths, state)
        start_role(self._paths, "munged")
        if config.accounting:
            self._start_accounting(config, state.site.user)
        wait_for_role(self._paths, "munged", self._paths.munge_socket.is_socket)
        start_role(self._paths, "slurmctld")
        wait_for_port(self._paths, "slurmctld")
        for name in config.node_names:
            start_role(self._paths, f"slurmd-{name}")
        self._wait_for_nodes(config)

    def _start_accounting(self, config: DevClusterConfig, starter: str) -> None:
        create_database(self._paths)
        start_role(self._paths, "mariadbd")
        socket = self._paths.database_socket
        wait_for_role(self._paths, "mariadbd", lambda: is_greeted_at(socket))
        wait_for_role(self._paths, "munged", self._paths.munge_socket.is_socket)
        start_role(self._paths, "slurmdbd")
        wait_for_port(self._paths, "slurmdbd")
        self._sacctmgr(render_setup(config, starter))

    def _wait_for_nodes(self, config: DevClusterConfig) -> None:
        for name in config.node_names:
            wait_for_port(self._paths, f"slurmd-{name}")
        wait_for_role(self._paths, "slurmctld", lambda: bool(self._query_nodes()))
        if wait_until(lambda: self._nodes_are_up(config.node_names), timeout_s=_READY_TIMEOUT_S):
            return
        late = [node for node in self._query_nodes() if not _is_up(node)]
        shown = ", ".join(
            f"{node.name} {node.state} ({node.reason or 'no reason'})" for node in late
        )
        role = f"slurmd-{late[0].name}" if late else "slurmctld"
        raise DevClusterError(
            f"after {_READY_TIMEOUT_S:g} s these nodes are not usable: {shown or 'all'}. {role} "
            f"says: {explain(self._paths, role)}. To fix: what it names; "
            f"lines of your own in slurm.conf are the first thing to suspect."
        )

    def _nodes_are_up(self, names: Sequence[str]) -> bool:
        nodes = {node.name: node for node in self._query_nodes()}
        return all(name in nodes and _is_up(nodes[name]) for name in names)

    def _query_nodes(self) -> tuple[NodeStatus, ...]:
        command = ["scontrol", "--oneliner", "--all", "show", "nodes"]
        try:
            asked = self.run(command, timeout_s=20, check=False)
        except subprocess.TimeoutExpired:
            return ()
        return parse_nodes(asked.stdout) if asked.returncode == 0 else ()

    def _sacctmgr(self, commands: Sequence[str]) -> None:
        run_sacctmgr(commands, environment=self.environment())

    def _finder(self, node: str = "") -> Callable[[], list[Process]]:
        """A function that finds the processes of the cluster, or of one node, each time anew.

        The nodes' namespaces are noted here, while the daemons by which they are known still run.
        """
        state = read_state(self._paths)
        namespaces = frozenset[str]()
        if state is not None and state.site.node_hostnames:
            namespaces = node_namespaces(read_processes(self.folder), folder=self.folder, node=node)
        return lambda: select_cluster(
            read_processes(self.folder),
            folder=self.folder,
            slurm_conf=self.slurm_conf,
            node=node,
            namespaces=namespaces,
        )

    def _end_daemon(self, role: str, *, kill: bool) -> None:
        daemon = find_daemon(self._paths, role)
        if daemon is None:
            raise DevClusterError(f"{role} does not run. To fix: start it before you stop it.")
        send_signal([daemon], signal.SIGKILL if kill else signal.SIGTERM)
        if not wait_until(lambda: find_daemon(self._paths, role) is None, timeout_s=30):
            raise DevClusterError(
                f"{role} (pid {daemon.pid}) is still there 30 s after its signal. "
                f"To fix: stop it with kill=True."
            )

    def _refuse_if_running(self, role: str) -> None:
        if daemon := find_daemon(self._paths, role):
            raise DevClusterError(
                f"{role} runs already (pid {daemon.pid}). To fix: stop it before you start it."
            )

    def _require_node(self, name: str) -> None:
        names = self.config.node_names
        if name not in names:
            raise DevClusterError(
                f"node={name!r}, but the cluster has {names[0]} to {names[-1]}. "
                f"To fix: name one of them."
            )

    def _erase(self) -> None:
        """Ends what could start new processes first, then everything, then removes the folder."""
        find = self._finder()
        end_processes(lambda: [p for p in find() if p.is_daemon and p.role.startswith(_STARTERS)])
        end_processes(find)
        shutil.rmtree(self.folder)


def parse_nodes(text: str) -> tuple[NodeStatus, ...]:
    """The nodes in the output of `scontrol --oneliner show nodes`."""
    nodes = []
    for line in text.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        if "NodeName" in fields and "State" in fields:
            reason = line.partition(" Reason=")[2].partition(" Comment=")[0].strip()
            nodes.append(NodeStatus(fields["NodeName"], fields["State"].lower(), reason))
    return tuple(nodes)


def _is_up(node: NodeStatus) -> bool:
    """Whether jobs can start there, now or after those that run: * means it does not respond."""
    bad = ("down", "drain", "unknown", "inval", "fail", "not_responding", "*")
    return not any(word in node.state for word in bad)
