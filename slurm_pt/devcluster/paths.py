"""Where things lie in a development cluster's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER_VARIABLE = "SLURM_PT_DEVCLUSTER"

# A Unix socket's path may have 107 characters; the longest of ours is `NODE_JOB.STEP` in a
# node's spool folder: "/spool/n250/n250_4294967295.4294967295".
_MAX_FOLDER_LENGTH = 107 - 40


def default_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder that is meant when none is named: SLURM_PT_DEVCLUSTER, or one per user."""
    environ = os.environ if environ is None else environ
    if named := environ.get(FOLDER_VARIABLE):
        return Path(named)
    parent = environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - ownership is checked at `up`
    return Path(parent) / f"slurm-pt-devcluster-{os.getuid()}"


@dataclass(frozen=True)
class ClusterPaths:
    """Every file of a development cluster. Nothing is written outside `folder`."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state.json"

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        # slurmdbd looks for it beside the slurm.conf that SLURM_CONF names.
        return self.folder / "etc" / "slurmdbd.conf"

    @property
    def gres_conf(self) -> Path:
        return self.folder / "etc" / "gres.conf"

    @property
    def cgroup_conf(self) -> Path:
        return self.folder / "etc" / "cgroup.conf"

    @property
    def mariadb_conf(self) -> Path:
        return self.folder / "etc" / "mariadb.cnf"

    @property
    def mariadb_init(self) -> Path:
        return self.folder / "etc" / "mariadb-init.sql"

    @property
    def hosts(self) -> Path:
        return self.folder / "etc" / "hosts"

    @property
    def munge_key(self) -> Path:
        return self.folder / "etc" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge.socket"

    @property
    def database(self) -> Path:
        """Of mode 700: whoever reaches the socket in it may do anything to the database."""
        return self.folder / "database"

    @property
    def database_socket(self) -> Path:
        return self.database / "mariadb.socket"

    @property
    def database_data(self) -> Path:
        return self.database / "data"

    @property
    def controller_state(self) -> Path:
        return self.folder / "controller"

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def gpus(self) -> Path:
        return self.folder / "gpu"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    def log(self, role: str) -> Path:
        """The log that the daemon itself writes."""
        return self.logs / f"{role}.log"

    def output(self, role: str) -> Path:
        """What the daemon printed: often the only place that says why it did not start."""
        return self.logs / f"{role}.out"


def paths_in(folder: Path | str) -> ClusterPaths:
    """The paths of the cluster in `folder`, which Slurm and its sockets must be able to use."""
    absolute = Path(os.path.abspath(folder))  # noqa: PTH100 - a link in it is kept as it is
    if len(os.fsencode(absolute)) > _MAX_FOLDER_LENGTH:
        raise DevClusterError(
            f"folder={absolute} has {len(os.fsencode(absolute))} characters, but sockets lie in "
            f"it, whose paths are limited: {_MAX_FOLDER_LENGTH} at most. "
            f"To fix: --folder, with a shorter path such as /tmp/slurm-pt."
        )
    # Slurm's configuration files know neither quotes nor escapes, and read %n as a node name.
    if unfit := sorted(set(str(absolute)) & set(" \t\n\"'#%=,;\\[]()")):
        raise DevClusterError(
            f"folder={absolute} contains {' '.join(map(repr, unfit))}, which Slurm's configuration "
            f"files cannot hold. To fix: --folder, with a path of letters, digits, - and _."
        )
    return ClusterPaths(absolute)
