"""A real Slurm of several nodes on one machine, for development, tests and demonstrations.

Takes: a folder and a `DevClusterConfig`. Gives: a running cluster with munge, an accounting
database, a controller and node daemons, all inside the folder. Never: writes outside the folder,
touches the machine's own Slurm, or ends a process that it did not start.

    cluster = DevCluster("/tmp/my-cluster")
    cluster.up(DevClusterConfig(nodes=4, gpus_per_node=8))
    cluster.run(["srun", "-N4", "hostname"])
    cluster.down()
"""

from slurm_pt.devcluster.cluster import ClusterStatus, DevCluster, NodeStatus
from slurm_pt.devcluster.config import DevClusterConfig
from slurm_pt.devcluster.deadlines import wait_until
from slurm_pt.devcluster.install import install_packages, missing_packages
from slurm_pt.devcluster.paths import default_folder

__all__ = [
    "ClusterStatus",
    "DevCluster",
    "DevClusterConfig",
    "NodeStatus",
    "default_folder",
    "install_packages",
    "missing_packages",
    "wait_until",
]
