"""What all tests share."""

from hypothesis import HealthCheck, settings

from tests.devcluster_fixture import (  # noqa: F401
    devcluster,
    slurm_packages,
    start_devcluster,
)

# No test depends on how fast the machine is: hypothesis's own limits do.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
