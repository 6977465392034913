"""torch.distributed.pipelining with its 1F1B schedule; inside a stage, DTensor if tp > 1."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.contestants import Train, stepwise
from benchmarks.contestants.torch_dtensor import clip_split_gradients, split_model
from benchmarks.reference import Decoder, Weights, adamw, load, mean_loss
from benchmarks.trial import layers_by_cost, layers_evenly

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """One stage a rank, of equal numbers of layers or, under the name with `cost`, of equal cost.

    Shapes are given, so that nothing is negotiated in the first step.
    """
    layout, size = trial.layout, trial.micro_batch_size
    mesh = init_device_mesh("cpu", (layout.pp, layout.tp), mesh_dim_names=("pp", "tp"))
    stage_index = mesh.get_local_rank("pp")
    split = layers_by_cost if trial.contestant.endswith("cost") else layers_evenly
    first, last = stage_index == 0, stage_index == layout.pp - 1
    module = Decoder(
        trial.model, layers=split(trial.model, layout.pp)[stage_index], first=first, last=last
    )
    load(module, weights)
    if layout.tp > 1:
        split_model(module, mesh["tp"])
    optimizer = adamw(trial, module.parameters())
    shape, model = (size, trial.model.seq_len), trial.model
    ids = torch.empty(shape, dtype=torch.int64, device="meta")
    hidden = torch.empty(*shape, model.hidden_size, device="meta", requires_grad=True)
    logits = torch.empty(*shape, model.vocab_size, device="meta", requires_grad=True)
    stage = PipelineStage(
        module,
        stage_index,
        layout.pp,
        torch.device("cpu"),
        input_args=(ids if first else hidden,),
        output_args=(logits if last else hidden,),
        group=mesh.get_group("pp"),
    )
    schedule = Schedule1F1B(stage, trial.num_microbatches, loss_fn=mean_loss)
    tp_rank = mesh.get_local_rank("tp")

    def step(batch: Tensor) -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        with loss_parallel() if layout.tp > 1 else contextlib.nullcontext():
            inputs = (batch[:, :-1],) if first else ()
            target = batch[:, 1:] if last else None
            schedule.step(*inputs, target=target, losses=losses if last else None)
        clip_split_gradients(module, trial.grad_clip, tp_rank=tp_rank)
        optimizer.step()
        return sum(float(loss) for loss in losses) / len(losses) if losses else None

    return stepwise(step)
