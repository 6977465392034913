"""What the ranks of test_traffic do: count the bytes of every call to a process group."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from slurm_pt.config.choices import GradientCompression, Schedule
from slurm_pt.config.schema import LoraConfig, ParallelConfig
from slurm_pt.plan import traffic
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.plan.parameters import COLUMN_PARALLEL
from slurm_pt.training.layers import NO_LORA
from slurm_pt.training.loop import train_loop
from tests.training.cases import LLAMA, MODEL, TRAIN, engine_of, groups_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from slurm_pt.config.schema import ModelConfig, TrainConfig
    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.training.rank_model import RankModel

ONE_STEP = replace(TRAIN, steps=1, micro_batch_size=1)
MODELS = {
    "tied": replace(MODEL, num_layers=8),
    "one key head": replace(LLAMA, num_layers=8, num_kv_heads=1),
}


def counted_and_planned(
    tokens: Path, layout: tuple[int, int, int], name: str, parallel: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """Bytes that this rank sends in one step, counted and by the formula, for each purpose."""
    model_config = MODELS[name]
    groups = groups_of(ParallelLayout(*layout), model_config)
    local_steps = parallel.pop("local_steps", 1)
    train = replace(ONE_STEP, steps=local_steps, local_steps=local_steps)
    config = ParallelConfig(
        **parallel
        | {
            "schedule": Schedule(parallel["schedule"]),
            "gradient_compression": GradientCompression(
                parallel.get("gradient_compression", "none")
            ),
        }
    )
    engine = engine_of(tokens, model_config, train, groups, parallel=config)
    with counting(groups) as sent:
        train_loop(engine)
    of_a_step = planned(engine.model, model_config, train, groups, config)
    groups.close()
    return {purpose: (sent[purpose] / local_steps, size) for purpose, size in of_a_step.items()}


@contextmanager
def counting(groups: ProcessGroups) -> Iterator[dict[str, float]]:
    """Within it, the bytes that this rank sends are added up by what they are for."""
    sent: dict[str, float] = defaultdict(float)
    purposes = {
        id(groups.tp): "tensor",
        id(groups.dp): "data",
        id(groups.pp): "pipeline",
        id(groups.pp_backward): "pipeline",
        id(groups.kv): "shared heads",
        id(groups.embedding): "tied embedding",
    }
    if groups.kv.size() == groups.tp.size() > 1:
        purposes[id(groups.kv)] = "shared heads"
    originals = {name: getattr(dist, name) for name in ("all_reduce", "batch_isend_irecv")}
    gathers = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
    originals |= {name: getattr(dist, name) for name in gathers}

    def all_reduce(tensor: Any, *arguments: Any, **options: Any) -> Any:
        group = options["group"]
        size = traffic.all_reduce_bytes(tensor.nbytes, group.size())
        sent[purposes.get(id(group), "all ranks")] += size
        return originals["all_reduce"](tensor, *arguments, **options)

    def gather(output: Any, tensor: Any, **options: Any) -> Any:
        group = options["group"]
        sent[purposes[id(group)]] += traffic.gather_bytes(output.nbytes, group.size())
        return originals["all_gather_single"](output, tensor, **options)

    def scatter(output: Any, tensor: Any, **options: Any) -> Any:
        group = options["group"]
        sent[purposes[id(group)]] += traffic.gather_bytes(tensor.nbytes, group.size())
        return originals["reduce_scatter_single"](output, tensor, **options)

    def exchange(output: Any, tensor: Any, **options: Any) -> Any:
        group = options["group"]
        sent[purposes[id(group)]] += traffic.gather_bytes(tensor.nbytes, group.size())
        return originals["all_to_all_single"](output, tensor, **options)

    def messages(ends: list[Any]) -> Any:
        for end in ends:
            if end.op is dist.isend:
                sent[purposes[id(end.group)]] += end.tensor.nbytes
        return originals["batch_isend_irecv"](ends)

    replaced = {
        "all_reduce": all_reduce,
        "all_gather_single": gather,
        "reduce_scatter_single": scatter,
        "all_to_all_single": exchange,
        "batch_isend_irecv": messages,
    }
    for name, function in replaced.items():
        setattr(dist, name, function)
    try:
        yield sent
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def planned(
    model: RankModel,
    config: ModelConfig,
    train: TrainConfig,
    groups: ProcessGroups,
    parallel: ParallelConfig,
    lora: LoraConfig = NO_LORA,
) -> dict[str, float]:
    """Bytes that this rank sends in one step, by the formulas; without recomputation."""
    layout, tp = groups.layout, groups.layout.tp
    parameters = model.trained_parameters()
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    owned = [
        (piece, model.owned(piece.of(parameters[piece.parameter])).numel())
        for piece in model.pieces()
        if piece.parameter in parameters
    ]
    shared = sum(
        size for piece, size in owned if piece.shard.dim is not None and piece.shard.parts < tp
    )
    whole = sum(size for piece, size in owned if piece.shard.dim is None)
    tied = model.tied_parameter() if lora.rank is None else None
    adapted = [target for target in lora.targets if target in COLUMN_PARALLEL]
    buffers = [] if model.sharding is None else model.sharding.buffers
    padding = sum(buffer.numel() for buffer in buffers) - sum(sizes.values()) if buffers else 0
    spans = [chunk.span for chunk in model.chunks]
    stage = traffic.StageShape(
        layers=sum(len(span.layers) for span in spans),
        has_embedding=any(span.first for span in spans),
        has_head=any(span.last for span in spans),
        parameters=sum(sizes.values()),
        whole_parameters=whole,
        shared_parameters=shared,
        tied_parameters=0 if tied is None else model.owned(tied).numel(),
        padding=padding,
        frozen=lora.rank is not None,
        adapter_ranks=(lora.rank or 0) * len(adapted),
    )
    step = traffic.StepShape(
        num_microbatches=train.global_batch_size // train.micro_batch_size // layout.dp,
        micro_batch_size=train.micro_batch_size,
        seq_len=train.seq_len,
        hidden_size=config.hidden_size,
        activation_bytes=8,
        loss_bytes=8,
        gradient_bytes=8,
        weight_bytes=8,
    )
    # Forward to the next stage unless it is the last, backward to the one before unless the first.
    sends = sum((not span.last) + (not span.first) for span in spans) if layout.pp > 1 else 0
    sequence = parallel.sequence
    return {
        "tensor": traffic.tensor_bytes(stage, step, tp=tp, sequence=sequence),
        "shared heads": traffic.shared_head_bytes(stage, step, sharing=groups.kv.size()),
        "pipeline": traffic.pipeline_bytes(step, sends=sends, tp=tp, sequence=sequence),
        "data": _planned_data_bytes(model, stage, step, layout.dp, parallel, train.local_steps),
        "tied embedding": traffic.tied_bytes(stage, step),
    }


def _planned_data_bytes(
    model: RankModel,
    stage: traffic.StageShape,
    step: traffic.StepShape,
    dp: int,
    parallel: ParallelConfig,
    local_steps: int,
) -> float:
    if local_steps > 1:
        return traffic.local_update_bytes(stage, step, dp=dp, local_steps=local_steps)
    if parallel.gradient_compression is GradientCompression.powersgd:
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        return traffic.powersgd_bytes(shapes, step, dp=dp, rank=parallel.powersgd_rank)
    halves = {GradientCompression.fp16, GradientCompression.bf16}
    number_bytes = 2 if parallel.gradient_compression in halves else None
    return traffic.data_bytes(stage, step, dp=dp, zero=parallel.zero, number_bytes=number_bytes)
