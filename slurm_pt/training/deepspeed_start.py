"""DeepSpeed, told what it must know of a run: its process groups, ZeRO stage and formats.

Nothing here is compiled: DeepSpeed builds its own kernels at their first use, which takes a minute
and a compiler on every node, and a build that was killed leaves a lock that blocks all later ones.
The update is torch's fused AdamW, on the device and, offloaded, on the CPU.

Importing DeepSpeed takes two seconds: this module does it when it is asked to.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_pt.config.choices import DType
from slurm_pt.config.schema import ParallelConfig, TrainConfig
from slurm_pt.parallel.groups import ProcessGroups

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn, optim

REDUCE_NUMBERS = 2**25
"""In one message of gradients; DeepSpeed holds a buffer of this size, 128 MiB in float32."""
PERSISTENT_NUMBERS = 100_000
"""ZeRO 3: smaller parameters (norms, biases) stay whole on every rank (DeepSpeed's own choice)."""
NEVER = 10**9
"""Steps between two of DeepSpeed's progress messages."""


@dataclass(frozen=True)
class Units:
    """Our groups by the names under which DeepSpeed asks for them (Megatron-LM's `mpu`)."""

    groups: ProcessGroups

    def get_model_parallel_rank(self) -> int:
        return self.groups.place.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self.groups.layout.tp

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.tp

    def get_tensor_model_parallel_rank(self) -> int:
        return self.groups.place.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.groups.layout.tp

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.tp

    def get_data_parallel_rank(self) -> int:
        return self.groups.place.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.groups.layout.dp

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.dp

    def get_data_parallel_group_ranks(self) -> tuple[int, ...]:
        return self.groups.layout.dp_ranks(self.groups.rank)


def load_deepspeed(groups: ProcessGroups) -> Any:
    """The module, on this rank's device and over the process groups that there are."""
    os.environ.setdefault("DS_ACCELERATOR", groups.device.type)
    # DeepSpeed takes it for the number of the device.
    if groups.device.index is not None:
        os.environ["LOCAL_RANK"] = str(groups.device.index)
    else:
        os.environ.setdefault("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
    import deepspeed

    # DeepSpeed 0.19 calls torch 2.13's collectives by their old names, in every step.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+", FutureWarning)
    # An all-reduce through shared memory, to be compiled; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if groups.device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    return deepspeed


def settings(
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    num_microbatches: int,
    on_cuda: bool,
    persistent_numbers: int = PERSISTENT_NUMBERS,
) -> dict[str, Any]:
    """DeepSpeed's configuration of a run."""
    host = {"device": "cpu", "pin_memory": on_cuda}
    zero: dict[str, Any] = {
        "stage": parallel.zero,
        "reduce_bucket_size": REDUCE_NUMBERS,
        "stage3_param_persistence_threshold": persistent_numbers,
    }
    if train.offload_optimizer:
        zero["offload_optimizer"] = host
    if train.offload_parameters:
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": train.grad_clip or 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": train.dtype is DType.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": NEVER,
    }


def partitioned_from_the_start(
    deepspeed: Any, config: dict[str, Any], groups: ProcessGroups
) -> contextlib.AbstractContextManager[Any]:
    """Within it, ZeRO 3 splits each layer when it is made: no rank ever holds the whole model."""
    if config["zero_optimization"]["stage"] < 3 or groups.layout.dp == 1:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = deepspeed.zero.Init(
        config_dict_or_path=config, mpu=Units(groups), data_parallel_group=groups.dp
    )
    return context


def adamw(model: nn.Module, train: TrainConfig) -> optim.Optimizer:
    """As our own: matrices decay, vectors do not."""
    import torch

    # ZeRO 3 has split the parameters, and keeps their shapes in `ds_shape`.
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        (matrices if len(shape) >= 2 else vectors).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )
