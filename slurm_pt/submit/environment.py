"""The environment that Slurm's commands are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

# What an outer job or a user's habits put there changes where a job goes (SBATCH_PARTITION), what
# it may use (SLURM_MEM_PER_CPU next to --mem is fatal to its first srun) and what squeue answers
# (SQUEUE_FORMAT, SLURM_TIME_FORMAT).
_PREFIXES = (
    # Another launcher's word about the rank of this process is not true of the job's.
    "GROUP_",
    "OMPI_COMM_WORLD_",
    "PMIX_",
    "PMI_",
    "TORCHELASTIC_",
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
_RANK_VARIABLES = frozenset(
    {
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
    }
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
        or name == f"{_OURS}DEVCLUSTER"
        or not (name in _RANK_VARIABLES or name.startswith((*_PREFIXES, _OURS)))
    }


def slurm_job_key(environ: Mapping[str, str]) -> str | None:
    """The id of the job this process belongs to, as squeue prints it; None outside one.

    >>> slurm_job_key({"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"})
    '7_1'
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID")


def slurm_requeue_key(environ: Mapping[str, str]) -> str | None:
    """The id that requeues this job and no other; None outside one.

    A bare array id can requeue every task. And sbatch hands SLURM_ARRAY_* of an outer task on to a
    plain job (seen in 22.05.8), so `ARRAY_TASK` may be the outer one: SLURM_JOB_ID is always the
    job's own, and of an array one task's, save where it is the id of the whole.

    >>> task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    >>> [slurm_requeue_key({"SLURM_JOB_ID": own, **task}) for own in ("8", "7")]
    ['8', '7_1']
    """
    own = environ.get("SLURM_JOB_ID")
    return slurm_job_key(environ) if own == environ.get("SLURM_ARRAY_JOB_ID") else own
