"""The daemons of a cluster: how each is started, when it is ready, and why it is not."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from slurm_pt.devcluster.deadlines import wait_until
from slurm_pt.devcluster.install import find_program
from slurm_pt.devcluster.ports import is_listening
from slurm_pt.devcluster.processes import (
    Process,
    daemon_environment,
    program_of,
    read_processes,
    start_daemon,
)
from slurm_pt.devcluster.site import ENTER_NODE
from slurm_pt.devcluster.state import ClusterState, require_state, write_state
from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from slurm_pt.devcluster.paths import ClusterPaths

_GONE_S = 1.0
"""A daemon that is not seen for so long has ended."""
_START_TIMEOUT_S = 90.0
"""On a machine with many times more to do than cores. A daemon that ends is seen at once."""


def daemon_command(paths: ClusterPaths, state: ClusterState, role: str) -> list[str]:
    """The command line of a daemon, kept in the foreground so that its pid is the one we get."""
    program = program_of(role)
    path = find_program(program) or program
    if program == "munged":
        return [
            path,
            "--foreground",
            "--force",  # it warns about folders that only their owner may enter, and goes on
            f"--key-file={paths.munge_key}",
            f"--socket={paths.munge_socket}",
            f"--pid-file={paths.run}/munged.pid",
            f"--log-file={paths.log('munged')}",
            f"--seed-file={paths.run}/munged.seed",
        ]
    if program == "mariadbd":
        return [path, f"--defaults-file={paths.mariadb_conf}"]
    if program == "slurmdbd":
        return [path, "-D"]
    node = role.partition("-")[2]
    command = [path, "-D", "-N", node] if program == "slurmd" else [path, "-D"]
    if state.site.node_hostnames:
        # The controller, too, must resolve the nodes' names: a job's srun gives it one as address.
        hostname = node or state.site.hostname
        return [*ENTER_NODE, hostname, str(paths.hosts), *command]
    return command


def start_role(paths: ClusterPaths, role: str, *arguments: str) -> None:
    """Starts the daemon and notes its pid; whether it gets ready is not waited for."""
    state = require_state(paths)
    extra = {"SLURM_CONF": str(paths.slurm_conf)}
    if role == "slurmdbd":
        extra["MYSQL_UNIX_PORT"] = str(paths.database_socket)
    pid = start_daemon(
        [*daemon_command(paths, state, role), *arguments],
        environment=daemon_environment(paths.folder, role, extra),
        output=paths.output(role),
        cwd=paths.run,
    )
    write_state(paths, state.with_pid(role, pid))


def find_daemon(paths: ClusterPaths, role: str) -> Process | None:
    """The running daemon, if there is one.

    Not always the pid that we started: newer Slurm replaces itself to read its configuration anew.
    """
    noted = require_state(paths).pids.get(role)
    running = [
        process
        for process in read_processes(paths.folder)
        if process.folder == str(paths.folder)
        and process.role == role
        # Before it becomes the daemon, the noted process is a shell for a moment.
        and (process.is_daemon or process.pid == noted)
    ]
    return next(iter(sorted(running, key=lambda process: process.pid != noted)), None)


def wait_for_role(paths: ClusterPaths, role: str, ready: Callable[[], bool]) -> None:
    """Returns when the daemon is ready; raises soon after it died, with the reason that it gave."""
    died = False
    missing_since: float | None = None

    def settled() -> bool:
        nonlocal died, missing_since
        if ready():
            return True
        if find_daemon(paths, role) is not None:
            missing_since = None
            return False
        # A process that is just becoming the daemon (execve) cannot be recognised for a moment.
        now = time.monotonic()
        missing_since = now if missing_since is None else missing_since
        died = now - missing_since >= _GONE_S
        return died

    settled_in_time = wait_until(settled, timeout_s=_START_TIMEOUT_S)
    if settled_in_time and not died:
        return
    what = "ended at once" if died else f"was not ready within {_START_TIMEOUT_S:g} s"
    raise DevClusterError(
        f"{role} {what}. It says: {explain(paths, role)}. To fix: what it names; "
        f"lines of your own in slurm.conf are the first thing to suspect."
    )


def explain(paths: ClusterPaths, role: str) -> str:
    """The lines of the daemon's output and log that explain most, in one line."""
    lines: list[str] = []
    for path in (paths.output(role), paths.log(role)):
        lines += _read_lines(path)
    for word in ("fatal", "error", ""):
        telling = [line for line in lines if word in line.lower()]
        if telling:
            break
    # "fatal: Unable to process configuration file" is only understood with the error before it.
    errors = [line for line in lines if "error" in line.lower() and _is_about_configuration(line)]
    return " / ".join(dict.fromkeys([*errors[:3], *telling[-3:]])) or "nothing at all"


def _is_about_configuration(line: str) -> bool:
    return any(word in line.lower() for word in ("pars", "config", "slurm.conf", "invalid"))


def _read_lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(errors="replace").splitlines() if line]
    except OSError:
        return []


def create_database(paths: ClusterPaths) -> None:
    """Creates the tables that MariaDB itself needs: about a second.

    They are needed although no grants are checked: slurmdbd stores procedures in one of them.
    """
    done = subprocess.run(
        [
            find_program("mariadb-install-db") or "mariadb-install-db",
            f"--defaults-file={paths.mariadb_conf}",
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
        ],
        env=daemon_environment(paths.folder, "mariadb-install-db", {}),
        capture_output=True,
        text=True,
        cwd=paths.run,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise DevClusterError(
            f"mariadb-install-db failed in {paths.database}: {' / '.join(lines[-3:])}. To fix: "
            f"what it names (a full disk is common), or `--no-accounting` to do without database."
        )


def wait_for_port(paths: ClusterPaths, role: str) -> None:
    """Returns when the daemon listens on its port."""
    site = require_state(paths).site
    ports = {"slurmctld": site.controller_port, "slurmdbd": site.database_port}
    config = require_state(paths).config
    ports |= {
        f"slurmd-{name}": port
        for name, port in zip(config.node_names, site.node_ports, strict=True)
    }
    wait_for_role(paths, role, lambda: is_listening(ports[role]))
