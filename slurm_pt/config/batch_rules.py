"""How a global batch is made up of micro-batches, and what keeps it from being so."""

from __future__ import annotations

from slurm_pt.config.schema import TrainConfig
from slurm_pt.errors import ConfigError, Problem


def batch_problem(train: TrainConfig, dp: int, *, degree: str | None = None) -> Problem | None:
    """Why the global batch cannot be cut; None: it can. `degree` says where dp comes from."""
    group = train.micro_batch_size * dp
    down = train.global_batch_size // group * group
    if down == train.global_batch_size > 0:
        return None
    sizes = f"{down} or {down + group}" if down else str(group)
    return Problem(
        "train.global_batch_size",
        train.global_batch_size,
        f"must be micro-batch * dp * accumulation steps, so a multiple of "
        f"train.micro_batch_size={train.micro_batch_size} * {degree or f'parallel.dp={dp}'} "
        f"= {group}",
        f"set train.global_batch_size={sizes}",
    )


def num_microbatches(train: TrainConfig, dp: int) -> int:
    """Forward passes of one rank in one step. Raises ConfigError if they are no whole number."""
    problem = batch_problem(train, dp)
    if problem is not None:
        raise ConfigError([problem])
    return train.global_batch_size // (train.micro_batch_size * dp)
