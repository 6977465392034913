"""The environment that Slurm's commands are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

# What an outer job or a user's habits put there changes where a job goes (SBATCH_PARTITION), what
# it may use (SLURM_MEM_PER_CPU next to --mem is fatal to its first srun) and what squeue answers
# (SQUEUE_FORMAT, SLURM_TIME_FORMAT).
_PREFIXES = (
    "SACCT_",
    "SALLOC_",
    "SBATCH_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SLURMD_",
    "SLURM_",
    "SQUEUE_",
    "SRUN_",
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER"})
_OURS = "SLURM_PT_"


def clean_environment(environ: Mapping[str, str], *, keep: Collection[str] = ()) -> dict[str, str]:
    """The environment without what belongs to an outer job; the user's own variables stay."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT
        or name in keep
        or not name.startswith((*_PREFIXES, _OURS))
        or name == f"{_OURS}DEVCLUSTER"
    }


def slurm_job_key(environ: Mapping[str, str]) -> str | None:
    """The id of the job this process belongs to, safe for requeue and update; None outside one.

    Of an array it is one task's: a bare array id can requeue every task.

    >>> slurm_job_key({"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"})
    '7_1'
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID")
