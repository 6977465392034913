"""What all tests share."""

from hypothesis import HealthCheck, settings

from tests.devcluster_fixture import (  # noqa: F401
    devcluster,
    slurm_packages,
    start_devcluster,
)

# No test depends on how fast the machine is, as hypothesis's own limits do, and a test that passed
# passes again; `--hypothesis-profile=explore` looks for cases that were never tried.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
