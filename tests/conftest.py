from tests.devcluster_fixture import (  # noqa: F401
    devcluster,
    slurm_packages,
    start_devcluster,
)
