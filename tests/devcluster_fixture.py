"""Fixtures that give tests a real Slurm; import them in conftest.py.

Usage: `from tests.devcluster_fixture import devcluster, start_devcluster  # noqa: F401`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from slurm_pt.devcluster import (
    DevCluster,
    DevClusterConfig,
    install_packages,
    missing_packages,
)
from slurm_pt.errors import DevClusterError

StartDevCluster = Callable[[DevClusterConfig], DevCluster]


@pytest.fixture(scope="session")
def slurm_packages() -> None:
    """Sees to it that Slurm is installed; skips, with the reason, where that cannot be."""
    if missing_packages():
        try:
            install_packages()
        except DevClusterError as error:
            pytest.skip(f"no Slurm on this machine: {error}")


@pytest.fixture(scope="session")
def devcluster(
    slurm_packages: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevCluster]:
    """One cluster for the whole session: 4 nodes of 8 CPUs and 8 pretend GPUs, QoS, grace 15 s.

    Shared: cancel the jobs that you submit, and leave its nodes and controller running.
    """
    cluster = DevCluster(tmp_path_factory.mktemp("dc") / "shared")
    cluster.up(DevClusterConfig(gpus_per_node=8))
    yield cluster
    cluster.down()


@pytest.fixture
def start_devcluster(
    slurm_packages: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartDevCluster]:
    """Starts clusters for one test, with options of its own; all are taken down after it."""
    started: list[DevCluster] = []
    parent = tmp_path_factory.mktemp("dc")

    def start(config: DevClusterConfig) -> DevCluster:
        cluster = DevCluster(parent / str(len(started)))
        started.append(cluster)
        cluster.up(config)
        return cluster

    yield start
    for cluster in started:
        cluster.down()
