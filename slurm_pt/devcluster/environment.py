"""Pointing a shell or a subprocess at a cluster, and away from every other one."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from slurm_pt.devcluster.paths import FOLDER_VARIABLE, ClusterPaths

if TYPE_CHECKING:
    from collections.abc import Mapping

# Variables with these beginnings change what Slurm's commands do, or say that we are in a job.
_SLURM_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SALLOC_",
    "SRUN_",
    "SQUEUE_",
    "SINFO_",
    "SACCT_",
    "SCONTROL_",
    "SCANCEL_",
    "SPRIO_",
    "SSHARE_",
    "SREPORT_",
    "STRIGGER_",
)
_OURS = "SLURM_PT_"
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def cluster_variables(paths: ClusterPaths) -> dict[str, str]:
    """The variables that point at the cluster: Slurm's own, and that of `slurm-pt devcluster`."""
    return {"SLURM_CONF": str(paths.slurm_conf), FOLDER_VARIABLE: str(paths.folder)}


def misleading_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables of another cluster, of a job, or of personal taste, that Slurm would obey."""
    return tuple(
        sorted(
            name
            for name in environ
            if name.startswith(_SLURM_PREFIXES) and not name.startswith(_OURS)
        )
    )


def cluster_environment(paths: ClusterPaths, base: Mapping[str, str]) -> dict[str, str]:
    """`base` without what misleads, and with what points at the cluster."""
    misleading = set(misleading_variables(base))
    kept = {name: value for name, value in base.items() if name not in misleading}
    return {**kept, **cluster_variables(paths)}


def render_shell(paths: ClusterPaths, environ: Mapping[str, str]) -> str:
    """The same as text to `eval` in any POSIX shell, one whose environment is `environ`."""
    exported = cluster_variables(paths)
    unset = [
        name
        for name in misleading_variables(environ)
        if name not in exported and _SHELL_NAME.fullmatch(name)
    ]
    lines = [f"unset {' '.join(unset)}"] if unset else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
    return "\n".join([*lines, ""])
