"""DeepSpeed's PipelineModule and engine, over pipeline and data parallel ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn

from benchmarks.contestants import Train, stepwise
from benchmarks.reference import Decoder, Weights, adamw, load, mean_loss

if TYPE_CHECKING:
    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """Stages of about equal numbers of parameters, DeepSpeed's own default."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Else the first start compiles an all-reduce through shared memory, which needs a compiler,
    # and takes a minute. gloo, which all others use, then does the work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    layout = trial.layout
    model = Decoder(trial.model)
    load(model, weights)
    module = PipelineModule(
        [model.embedding, *model.layers.values(), _Head(model)],
        topology=PipeDataParallelTopology(num_pp=layout.pp, num_dp=layout.dp),
        loss_fn=mean_loss,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    # Its norm counts, of all stages but the first, only parameters with this mark: without it the
    # gradients are clipped by the norm of the first stage, which our check finds.
    for parameter in module.parameters():
        parameter.model_parallel = layout.pp > 1
    engine, _, _, _ = deepspeed.initialize(
        model=module, optimizer=adamw(trial, module.parameters()), config=_config(trial)
    )
    # Losses are wanted once a step by this benchmark, not printed by the engine.
    dp_rank = engine.grid.get_data_parallel_rank()

    def step(batch: Tensor) -> float:
        part = batch.chunk(layout.dp)[dp_rank]
        pieces = ((t[:, :-1], t[:, 1:]) for t in part.split(trial.micro_batch_size))
        return float(engine.train_batch(pieces))

    dist.barrier()
    return stepwise(step)


class _Head(nn.Module):
    """The last norm and the output head: the last of the layers in a row."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.norm, self.head = model.final_norm, model.head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def _config(trial: Trial) -> dict[str, object]:
    return {
        "train_batch_size": trial.global_batch_size,
        "train_micro_batch_size_per_gpu": trial.micro_batch_size,
        "gradient_accumulation_steps": trial.num_microbatches,
        "gradient_clipping": trial.grad_clip,
        "steps_per_print": 10**9,
    }
