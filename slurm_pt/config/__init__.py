"""Configuration: takes OmegaConf, gives frozen, checked dataclasses.

Never touches the disk, the network or torch.
"""

from slurm_pt.config.choices import DType, Engine, Schedule
from slurm_pt.config.door import plain_config, read_config, read_job_config, signature
from slurm_pt.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    JobConfig,
    MixtureSource,
    ModelConfig,
    MonitorConfig,
    ParallelConfig,
    RunConfig,
    SlurmConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "DType",
    "DataConfig",
    "Engine",
    "JobConfig",
    "MixtureSource",
    "ModelConfig",
    "MonitorConfig",
    "ParallelConfig",
    "RunConfig",
    "Schedule",
    "SlurmConfig",
    "TrainConfig",
    "plain_config",
    "read_config",
    "read_job_config",
    "signature",
]
