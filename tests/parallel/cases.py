"""What the ranks of the parallel tests run."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from slurm_pt.parallel.data import GradientBuckets, counts_here, squared_norm
from slurm_pt.parallel.groups import ProcessGroups, agree, all_reduce, create_groups
from slurm_pt.parallel.pipeline import Message, run_pipeline
from slurm_pt.parallel.shard import WHOLE, Shard
from slurm_pt.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorAxis,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from slurm_pt.plan.layout import ParallelLayout

CPU = torch.device("cpu")
DOUBLE: dict[str, Any] = {"device": CPU, "dtype": torch.float64}


def make(tp: int, pp: int, dp: int) -> ProcessGroups:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    return create_groups(layout, rank=dist.get_rank(), device=CPU, timeout_s=60.0)


def memberships(layouts: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """The members of this rank's groups in each layout, made and closed one after another."""
    found = []
    for degrees in layouts:
        groups = make(*degrees)
        row: dict[str, Any] = {
            name: None if group is None else dist.get_process_group_ranks(group)
            for name, group in vars(groups).items()
            if group is None or isinstance(group, dist.ProcessGroup)
        }
        row["agreed"] = [agree(groups, dist.get_rank() == rank) for rank in (0, 1, -1)]
        found.append(row)
        groups.close()
    return found


def layers_match(sequence: bool) -> dict[str, float]:
    """Largest differences to whole layers, of outputs and gradients, with tp over all ranks."""
    groups = make(dist.get_world_size(), 1, 1)
    torch.manual_seed(0)
    whole = [
        nn.Embedding(16, 6, **DOUBLE),
        nn.Linear(6, 8, **DOUBLE),
        nn.Linear(8, 6, **DOUBLE),
        nn.Linear(6, 16, bias=False, **DOUBLE),
    ]
    axis = TensorAxis.of(groups, sequence=sequence)
    parts = [
        VocabParallelEmbedding(16, 6, axis=axis, **DOUBLE),
        ColumnParallelLinear(6, 8, axis=axis, **DOUBLE),
        RowParallelLinear(8, 6, axis=axis, **DOUBLE),
        ColumnParallelLinear(6, 16, axis=axis, bias=False, **DOUBLE),
    ]

    def mine(full: Tensor, part: nn.Module, name: str) -> Tensor:
        (stored,) = part.stored_parts(name)
        dim, tp = stored.shard.dim, groups.layout.tp
        return full if dim is None else full.chunk(tp, dim)[groups.place.tp_rank]

    with torch.no_grad():
        for full, part in zip(whole, parts, strict=True):
            for name, parameter in part.named_parameters():
                parameter.copy_(mine(full.get_parameter(name), part, name))
    ids, targets = torch.randint(0, 16, (2, 4, 5))
    weights = torch.rand(4, 5, dtype=torch.float64)  # so that the tokens' gradients differ

    def run(layers: list[nn.Module]) -> Tensor:
        embed, up, down, head = layers
        hidden = embed(ids)
        return head(hidden + down(torch.tanh(up(hidden))))

    expected = functional.cross_entropy(
        run(whole).flatten(0, 1), targets.flatten(), reduction="none"
    )
    losses = vocab_parallel_cross_entropy(run(parts), targets, axis=axis)
    (expected.view(4, 5) * weights).sum().backward()
    (losses * weights).sum().backward()
    if sequence:  # of the row's bias each rank has seen its part of the sequence
        all_reduce(parts[2].bias.grad, groups.tp)
    worst = {"loss": (losses - expected.view(4, 5)).abs().max().item()}
    for index, (full, part) in enumerate(zip(whole, parts, strict=True)):
        for name, parameter in part.named_parameters():
            grad = mine(full.get_parameter(name).grad, part, name)
            worst[f"{index}.{name}"] = (parameter.grad - grad).abs().max().item()
    groups.close()
    return worst


def extreme_logits() -> list[bool]:
    """Whether losses and gradients stay finite and right for logits far out of exp's range."""
    groups = make(dist.get_world_size(), 1, 1)
    part = slice(groups.place.tp_rank * 2, groups.place.tp_rank * 2 + 2)
    logits = torch.tensor([[[1e4, -1e4, 0.0, 5.0, 1e4, 0.0, -3.0, 2.0]]], dtype=torch.float64)
    whole, local = logits.clone().requires_grad_(), logits[..., part].clone().requires_grad_()
    target = torch.tensor([[1]])
    expected = functional.cross_entropy(whole[0], target[0])
    loss = vocab_parallel_cross_entropy(local, target, axis=TensorAxis.of(groups))
    expected.backward()
    loss.sum().backward()
    groups.close()
    return [
        torch.allclose(loss.sum(), expected, rtol=1e-12),
        torch.allclose(local.grad, whole.grad[..., part], rtol=1e-12, atol=1e-12),
    ]


def pipelines_match(counts: list[int]) -> list[tuple[float, float, float]]:
    """For each number of micro-batches: (loss, difference of loss, difference of gradient).

    The model is one matrix a stage; the same is computed whole on each rank to compare.
    """
    groups = make(1, dist.get_world_size(), 1)
    stages, stage = groups.layout.pp, groups.place.pp_rank
    found = []
    for count in counts:
        torch.manual_seed(count)
        matrices = [torch.randn(4, 4, dtype=torch.float64) for _ in range(stages)]
        inputs = [torch.randn(2, 4, dtype=torch.float64) for _ in range(count)]
        weight = matrices[stage].clone().requires_grad_()

        def forward(entered: Tensor | None, micro_batch: Tensor) -> Tensor:
            output = torch.tanh((micro_batch if entered is None else entered) @ weight)  # noqa: B023
            return output.square().mean() if groups.last_stage else output * 1.0

        message = Message(shape=(2, 4), dtype=torch.float64)
        loss = run_pipeline(forward, inputs, message=message, groups=groups)
        whole = [matrix.clone().requires_grad_() for matrix in matrices]
        expected = torch.zeros((), dtype=torch.float64)
        for hidden in inputs:
            for matrix in whole:
                hidden = torch.tanh(hidden @ matrix)
            expected = expected + hidden.square().mean() / count
        expected.backward()
        off = (loss - expected.detach()).abs().item() if groups.last_stage else loss.item()
        found.append((loss.item(), off, (weight.grad - whole[stage].grad).abs().max().item()))
    groups.close()
    return found


def outputs_alive(count: int) -> list[int]:
    """On the first stage, how many outputs of earlier micro-batches live at each forward pass."""
    groups = make(1, dist.get_world_size(), 1)
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)

    def forward(entered: Tensor | None, micro_batch: Tensor) -> Tensor:
        alive.append(sum(reference() is not None for reference in outputs))
        output = (micro_batch if entered is None else entered) + weight
        outputs.append(weakref.ref(output))
        return output.mean() if groups.last_stage else output

    inputs = [torch.ones(2, 4, dtype=torch.float64) for _ in range(count)]
    run_pipeline(forward, inputs, message=Message(shape=(2, 4), dtype=torch.float64), groups=groups)
    groups.close()
    return alive


def averages() -> dict[str, Any]:
    """Gradients averaged over 4 dp ranks, from buckets of two parameters each."""
    groups = make(1, 1, dist.get_world_size())
    parameters = [nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)) for _ in range(5)]
    buckets = GradientBuckets(parameters, group=groups.dp, bucket_bytes=2 * 6 * 8)
    for number, parameter in enumerate(parameters):
        parameter.grad.add_(number * 10.0 + groups.place.dp_rank)
    buckets.average()
    values = [parameter.grad.unique().tolist() for parameter in parameters]
    buckets.zero()
    zeros = [parameter.grad.abs().max().item() for parameter in parameters]
    groups.close()
    return {"values": values, "zeros": zeros, "buckets": len(buckets.buffers)}


def norm_of_ones() -> float:
    """The squared norm over all ranks of a split and a whole gradient, all ones.

    tp2 pp2 dp2. Each stage has a split parameter of 4 numbers (2 a rank) and a whole one of 3;
    the whole one of the first stage is taken for a tied copy.
    """
    groups = make(2, 2, 2)
    sizes = {"split": 2, "whole": 3}
    parameters = {
        name: nn.Parameter(torch.zeros(size, dtype=torch.float64)) for name, size in sizes.items()
    }
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    shards = {"split": Shard.over(0, tp=2, tp_rank=groups.place.tp_rank), "whole": WHOLE}
    names = ["split", "whole"] if groups.last_stage else ["split"]
    counted = [parameters[name].grad for name in names if counts_here(shards[name], groups)]
    total = all_reduce(squared_norm(counted, device=CPU), groups.world).item()
    groups.close()
    return total
