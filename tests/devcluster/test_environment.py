import os
import subprocess
import sys

import pytest

from slurm_pt.devcluster import DevCluster
from slurm_pt.devcluster.environment import cluster_environment, render_shell
from slurm_pt.devcluster.paths import paths_in
from slurm_pt.errors import DevClusterError

MISLEADING = {
    "SLURM_JOB_ID": "7",
    "SBATCH_PARTITION": "site",
    "SQUEUE_FORMAT": "%i",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
}


def test_a_subprocess_gets_this_cluster_and_nothing_of_another():
    environ = cluster_environment(paths_in("/tmp/x"), {**MISLEADING, "HOME": "/h"})
    assert environ == {
        "HOME": "/h",
        "SLURM_CONF": "/tmp/x/etc/slurm.conf",
        "SLURM_PT_DEVCLUSTER": "/tmp/x",
    }


def test_variables_of_slurm_pt_itself_are_kept():
    assert "SLURM_PT_THING" in cluster_environment(paths_in("/tmp/x"), {"SLURM_PT_THING": "1"})


def test_a_shell_that_evaluates_the_text_has_the_same_environment():
    # A name that is no shell name cannot be unset, and must not become a command.
    environ = {**MISLEADING, "SLURM_X;touch pwned": "1", "PATH": os.environ["PATH"]}
    text = render_shell(paths_in("/tmp/$HOME`id`"), environ)
    values = '"$SLURM_CONF" "${SLURM_JOB_ID-none}" "${SQUEUE_FORMAT-none}"'
    script = f'{text}\nprintf "%s|%s|%s" {values}'
    done = subprocess.run(
        ["sh", "-euc", script], env=environ, capture_output=True, text=True, check=True, timeout=10
    )
    assert done.stdout == "/tmp/$HOME`id`/etc/slurm.conf|none|none"
    assert "pwned" not in text


def test_asking_for_the_environment_of_no_cluster_is_an_error(tmp_path):
    with pytest.raises(DevClusterError, match="holds no development cluster"):
        DevCluster(tmp_path / "dc").environment()


def test_importing_the_devcluster_stays_light():
    code = (
        "import sys, slurm_pt.devcluster.commands;"
        "print({'torch', 'hydra', 'omegaconf', 'submitit', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
