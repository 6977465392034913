"""The name of one start, that all its ranks know."""

from __future__ import annotations

import pytest

from slurm_pt.errors import LaunchError
from slurm_pt.launch.environment import Launcher, RankInfo
from slurm_pt.launch.rendezvous import launch_key


def info_of(launcher, **changes):
    return RankInfo(0, 2, 0, 2, 0, 1, launcher, **changes)


@pytest.mark.parametrize(
    ("info", "environ", "key"),
    [
        (
            info_of(Launcher.slurm, job_id="7", step_id="3", restart_count=1),
            {},
            "job7-step3-start1",
        ),
        (
            info_of(Launcher.torchrun),
            {
                "TORCHELASTIC_RUN_ID": "r",
                "TORCHELASTIC_RESTART_COUNT": "2",
                "MASTER_PORT": "29500",
            },
            "torchrun-r-2-29500",
        ),
        (
            info_of(Launcher.torchrun, job_id="7"),
            {"TORCHELASTIC_RUN_ID": "r"},
            "torchrun-r-job7-stepnone-start0",
        ),
        (info_of(Launcher.explicit), {"SLURM_PT_LAUNCH_KEY": "local-1a"}, "local-1a"),
        (info_of(Launcher.mpi), {"PMIX_NAMESPACE": "prterun-1"}, "prterun-1"),
        (info_of(Launcher.mpi, job_id="7"), {}, "job7-stepnone-start0"),
    ],
)
def test_f11_the_launch_key_names_one_start(info, environ, key):
    assert launch_key(info, environ) == key


def test_a_launch_key_is_fit_for_a_file_name():
    info = info_of(Launcher.explicit)
    one, other = (launch_key(info, {"SLURM_PT_LAUNCH_KEY": text}) for text in ("../a b", "../a/b"))
    assert one.startswith(".._a_b-")
    assert one != other
    assert len(launch_key(info, {"SLURM_PT_LAUNCH_KEY": "x" * 300})) < 120


def test_a_start_without_a_name_is_refused():
    with pytest.raises(LaunchError, match="SLURM_PT_LAUNCH_KEY"):
        launch_key(info_of(Launcher.explicit), {})
