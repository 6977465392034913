"""What a cluster's folder remembers, so that any later process can find and end the cluster."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurm_pt.devcluster.config import DevClusterConfig
from slurm_pt.devcluster.render import Site
from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from pathlib import Path

    from slurm_pt.devcluster.paths import ClusterPaths

_FORMAT = "slurm-pt-devcluster-1"


@dataclass(frozen=True)
class ClusterState:
    """The options, what the machine decided, and the pids of the daemons by role."""

    config: DevClusterConfig
    site: Site
    pids: dict[str, int] = field(default_factory=dict)

    def with_pid(self, role: str, pid: int) -> ClusterState:
        """The same state after daemon `role` was started as `pid`."""
        return dataclasses.replace(self, pids={**self.pids, role: pid})


def write_state(paths: ClusterPaths, state: ClusterState) -> None:
    """Replaces state.json in one rename, so that a reader never sees half of it."""
    content = {"format": _FORMAT, **dataclasses.asdict(state)}
    temporary = paths.state.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, paths.state)  # noqa: PTH105


def read_state(paths: ClusterPaths) -> ClusterState | None:
    """The state in the folder; None where there is no cluster."""
    try:
        content = json.loads(paths.state.read_text())
        if content.pop("format") != _FORMAT:
            raise ValueError("written by another version")
        site = content.pop("site")
        return ClusterState(
            config=DevClusterConfig(**content.pop("config")),
            site=Site(**{**site, "node_ports": tuple(site["node_ports"])}),
            **content,
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DevClusterError(
            f"{paths.state} cannot be read as the state of a cluster ({error}). "
            f"To fix: name another --folder, or remove this one once nothing runs in it."
        ) from error


def require_state(paths: ClusterPaths) -> ClusterState:
    """The state in the folder, where a cluster is expected."""
    state = read_state(paths)
    if state is None:
        raise DevClusterError(
            f"folder={paths.folder} holds no development cluster. To fix: start one with "
            f"`slurm-pt devcluster up --folder {paths.folder}`, or name its folder."
        )
    return state


def is_empty_folder(folder: Path) -> bool:
    """Whether `folder` exists and has nothing in it."""
    return folder.is_dir() and next(folder.iterdir(), None) is None
