"""torch's tensor parallelism: DTensor parameters, loss on logits that stay split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.contestants.accumulation import accumulate
from benchmarks.reference import Decoder, Weights, clip_gradients, gradients_of, load

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchmarks.contestants import Train
    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """Tensor parallel over all ranks."""
    model = Decoder(trial.model)
    load(model, weights)
    mesh = init_device_mesh("cpu", (trial.layout.tp,))
    split_model(model, mesh)

    def clip() -> None:
        clip_split_gradients(model, trial.grad_clip, tp_rank=mesh.get_local_rank())

    return accumulate(
        trial,
        model,
        lambda batch: batch.split(trial.micro_batch_size),
        clip=clip,
        around=loss_parallel,
        number=lambda loss: float(_local(loss)),
    )


def split_model(model: Decoder, mesh: DeviceMesh) -> None:
    """The usual plan: two all-reduces a half block, and one for the embeddings.

    Without sequence parallelism, which is slower here (it moves as much, in more pieces).
    """
    plan = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.qkv": ColwiseParallel(),
        "layers.*.attention.output": RowwiseParallel(),
        "layers.*.ffn.gate": ColwiseParallel(),
        "layers.*.ffn.up": ColwiseParallel(),
        "layers.*.ffn.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    there = {name.partition(".")[0] for name, _ in model.named_parameters()}
    gated = any("ffn.gate" in name for name, _ in model.named_parameters())
    # torch warns of names that match nothing: a stage has no head, GPT-2 no gate.
    kept = {
        name: style
        for name, style in plan.items()
        if name.partition(".")[0] in there and (gated or "gate" not in name)
    }
    parallelize_module(model, mesh, kept)


def clip_split_gradients(
    model: nn.Module, max_norm: float, *, tp_rank: int, group: dist.ProcessGroup | None = None
) -> None:
    """Clip by the norm over all ranks; what is whole on each tp rank counts on the first.

    torch's own `clip_grad_norm_` refuses DTensors and plain tensors together.
    """
    gradients, counted = [], []
    for gradient in gradients_of(model.parameters()):
        local = _local(gradient)
        gradients.append(local)
        split = isinstance(gradient, DTensor) and gradient.placements[0].is_shard()
        if split or tp_rank == 0:
            counted.append(local)
    everyone = dist.group.WORLD if group is None else group
    clip_gradients(gradients, max_norm, counted=counted, group=everyone)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
