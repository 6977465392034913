"""A toy set of named tensors that any layout can hold, every element recognisable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurm_pt.checkpoint.checkpointer import Checkpointer
from slurm_pt.config.schema import CheckpointConfig
from slurm_pt.parallel.groups import ProcessGroups, create_groups
from slurm_pt.parallel.shard import WHOLE, Shard
from slurm_pt.plan.layout import ParallelLayout, split_layers

NUM_LAYERS = 4
GROUPS_TIMEOUT_S = 60.0


def whole_tensors(step: int = 0) -> dict[str, tuple[Tensor, int | None]]:
    """Name to whole tensor and the dim that tp splits. No two elements of a format are equal."""
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {"embedding.weight": ((16, 6), 0)}
    for layer in range(NUM_LAYERS):
        shapes[f"layers.{layer}.up.weight"] = ((24, 6), 0)
        shapes[f"layers.{layer}.down.weight"] = ((6, 24), 1)
        shapes[f"layers.{layer}.norm.weight"] = ((6,), None)
    weights: dict[str, tuple[Tensor, int | None]] = {}
    start = 1 + 100_000 * step
    for prefix in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
        for name, (shape, dim) in shapes.items():
            size = torch.Size(shape).numel()
            whole = torch.arange(start, start + size, dtype=torch.float32).reshape(shape)
            weights[prefix + name] = whole, dim
            start += size
    weights["layers.0.half"] = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4) + step, 1
    weights["optimizer.step"] = torch.tensor(step, dtype=torch.int64), None
    return weights


def stage_of(name: str, pp: int) -> tuple[int, ...]:
    """The stages that hold a tensor: the tied embedding is on the first and on the last one."""
    if "embedding" in name:
        return (0, pp - 1)
    if "layers." not in name:
        return tuple(range(pp))
    layer = int(name.partition("layers.")[2].partition(".")[0])
    stages = split_layers(NUM_LAYERS, pp)
    return tuple(stage for stage, layers in enumerate(stages) if layer in layers)


def local_tensors(
    groups: ProcessGroups, step: int = 0
) -> tuple[dict[str, Tensor], dict[str, Shard]]:
    """This rank's tensors as they are at a step, and which parts of the whole they are."""
    tensors: dict[str, Tensor] = {}
    shards: dict[str, Shard] = {}
    tp, tp_rank = groups.layout.tp, groups.place.tp_rank
    for name, (whole, dim) in whole_tensors(step).items():
        if groups.place.pp_rank not in stage_of(name, groups.layout.pp):
            continue
        if dim is None:
            tensors[name], shards[name] = whole.clone(), WHOLE
        else:
            tensors[name] = whole.chunk(tp, dim)[tp_rank].clone()
            shards[name] = Shard.over(dim, tp=tp, tp_rank=tp_rank)
    return tensors, shards


def assert_is_step(tensors: dict[str, Tensor], groups: ProcessGroups, step: int) -> None:
    expected, _ = local_tensors(groups, step)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), f"{name}: {tensor} is not {expected[name]}"


def zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def groups_of(tp: int, pp: int, dp: int) -> ProcessGroups:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    rank = torch.distributed.get_rank()
    cpu = torch.device("cpu")
    return create_groups(layout, rank=rank, device=cpu, timeout_s=GROUPS_TIMEOUT_S)


class Events:
    """Keeps what a checkpointer reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, figures: dict[str, Any]) -> None:
        self.seen.append((event, figures))

    def names(self) -> list[str]:
        return [event for event, _ in self.seen]


def owns_the_run() -> None:
    """A `may_commit` that always agrees."""


def checkpointer(folder: Path, groups: ProcessGroups, **settings: Any) -> Checkpointer:
    config = {
        key: settings.pop(key) for key in ("keep_last", "asynchronous", "verify") if key in settings
    }
    settings.setdefault("may_commit", owns_the_run)
    return Checkpointer(folder, groups=groups, config=CheckpointConfig(**config), **settings)


def save_step(saver: Checkpointer, groups: ProcessGroups, step: int, *, wait: bool = True) -> None:
    tensors, shards = local_tensors(groups, step)
    saver.save(
        step,
        tensors,
        shards=shards,
        rank_state={"rank": groups.rank, "step": step},
        common={"data_position": 10 * step},
        wait=wait,
    )
