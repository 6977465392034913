"""Writing a cluster's folder: configuration files, keys, pretend GPUs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_pt.devcluster.render import (
    render_cgroup_conf,
    render_gres_conf,
    render_hosts,
    render_mariadb_conf,
    render_mariadb_init,
    render_slurm_conf,
    render_slurmdbd_conf,
)
from slurm_pt.devcluster.state import ClusterState, is_empty_folder
from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from slurm_pt.devcluster.paths import ClusterPaths


def claim_folder(folder: Path) -> None:
    """Creates the folder; a folder with anything in it is never taken over.

    Mode 755 for root, whose cluster any user of the machine may submit to, else 700.
    """
    if os.path.lexists(folder) and not is_empty_folder(folder):
        raise DevClusterError(
            f"folder={folder} already holds something that is no development cluster, and `down` "
            f"would remove it. To fix: --folder, with a path that does not exist yet."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError("it belongs to another user")
        folder.chmod(0o755 if os.geteuid() == 0 else 0o700)
    except OSError as error:
        raise DevClusterError(
            f"folder={folder} cannot be used: {error}. "
            f"To fix: --folder, with a path that you may create, such as /tmp/slurm-pt."
        ) from error


def write_files(paths: ClusterPaths, state: ClusterState) -> None:
    """Everything that the daemons read, and the empty folders that they write to."""
    config, site = state.config, state.site
    for folder in (paths.slurm_conf.parent, paths.logs, paths.run, paths.spool, paths.gpus):
        folder.mkdir(mode=0o755)
    for folder in (paths.database, paths.database_data, paths.controller_state):
        folder.mkdir(mode=0o700)
    for name in config.node_names:
        (paths.spool / name).mkdir(mode=0o755)
    _write(paths.munge_key, secrets.token_bytes(128), mode=0o600)
    _write(paths.slurmdbd_conf, render_slurmdbd_conf(paths, site).encode(), mode=0o600)
    readable = {
        paths.slurm_conf: render_slurm_conf(config, paths, site),
        paths.gres_conf: render_gres_conf(config, paths),
        paths.cgroup_conf: render_cgroup_conf(site),
        paths.mariadb_conf: render_mariadb_conf(paths, site),
        paths.mariadb_init: render_mariadb_init(),
        paths.hosts: render_hosts(config, _machine_hosts()),
    }
    for path, text in readable.items():
        _write(path, text.encode(), mode=0o644)
    for number in range(config.gpus_per_node):
        # Slurm only wants a character device that exists; a link needs no right to make one.
        (paths.gpus / f"nvidia{number}").symlink_to("/dev/null")


def _machine_hosts() -> str:
    try:
        return Path("/etc/hosts").read_text()
    except OSError:
        return "127.0.0.1 localhost\n"


def _write(path: Path, content: bytes, *, mode: int) -> None:
    """Writes a new file that nobody else could open before its mode was right."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
