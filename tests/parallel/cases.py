"""What the ranks of the parallel tests run."""

from __future__ import annotations

import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from slurm_pt.config.choices import DType, Schedule
from slurm_pt.config.schema import ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.gradient_buckets import GradientBuckets
from slurm_pt.parallel.gradient_norm import counts_here, squared_norm
from slurm_pt.parallel.gradient_sums import sum_tied_gradient
from slurm_pt.parallel.groups import ProcessGroups, agree, all_reduce, create_groups
from slurm_pt.parallel.pipeline import Chunk, Message, run_forward_pipeline, run_pipeline
from slurm_pt.parallel.shard import WHOLE, Shard
from slurm_pt.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from slurm_pt.parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from slurm_pt.parallel.weight_gradients import WeightGradients
from slurm_pt.parallel.zero import ShardedParameters
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.model import GPTStage, StageSpan
from slurm_pt.training.rank_model import RankModel

CPU = torch.device("cpu")
DOUBLE: dict[str, Any] = {"device": CPU, "dtype": torch.float64}

GPT = ModelConfig(num_layers=8, hidden_size=16, num_heads=2, vocab_size=32, max_seq_len=8)
TRAIN = TrainConfig(steps=1, global_batch_size=1, seq_len=8, dtype=DType.float64, seed=3)


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
        row["timeouts"] = {name: timeout_of(getattr(groups, name)) for name in ("tp", "pp", "dp")}
        row["background timeout"] = timeout_of(groups.background)
        row["background is its own"] = groups.background not in (groups.world, groups.dp, groups.tp)
        row["agreed"] = [agree(groups, dist.get_rank() == rank) for rank in (0, 1, -1)]
        found.append(row)
        groups.close()
    return found


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(CPU).options._timeout
    return timeout


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


def pipelines_match(
    runs: list[tuple[str, int, int]],
) -> list[dict[str, float]]:
    """For each (schedule, virtual stages, micro-batches), the differences to one process.

    The model is one matrix a stage; the same is computed whole on each rank to compare. Also the
    losses themselves, those of a forward-only pipeline among them.
    """
    groups = make(1, dist.get_world_size(), 1)
    return [
        _pipeline_matches(Schedule(name), virtual, count, groups) for name, virtual, count in runs
    ]


def _pipeline_matches(
    schedule: Schedule, virtual: int, count: int, groups: ProcessGroups
) -> dict[str, float]:
    pp, rank = groups.layout.pp, groups.place.pp_rank
    torch.manual_seed(count)
    matrices = [torch.randn(4, 4, dtype=torch.float64) for _ in range(pp * virtual)]
    inputs = [torch.randn(2, 4, dtype=torch.float64) for _ in range(count)]
    later = WeightGradients()
    axis = TensorAxis(weight_gradients=later)
    layers = [ColumnParallelLinear(4, 4, axis=axis, bias=False, **DOUBLE) for _ in range(virtual)]
    with torch.no_grad():
        for chunk, layer in enumerate(layers):
            layer.weight.copy_(matrices[chunk * pp + rank])

    def chunk_of(chunk: int) -> Chunk[Tensor]:
        def forward(entered: Tensor | None, micro_batch: Tensor) -> Tensor:
            output = torch.tanh(layers[chunk](micro_batch if entered is None else entered))
            last = groups.last_stage and chunk == virtual - 1
            return output.square().mean() if last else output

        return forward

    chunks = [chunk_of(chunk) for chunk in range(virtual)]
    message = Message(shape=(2, 4), dtype=torch.float64)
    evaluated = run_forward_pipeline(chunks, inputs, message=message, groups=groups)
    loss = run_pipeline(
        chunks,
        inputs,
        message=message,
        groups=groups,
        schedule=schedule,
        weight_gradients=later,
    )
    whole = [matrix.clone().requires_grad_() for matrix in matrices]
    expected = torch.zeros((), dtype=torch.float64)
    for hidden in inputs:
        for matrix in whole:
            hidden = torch.tanh(hidden @ matrix.t())
        expected = expected + hidden.square().mean() / count
    expected.backward()
    known = expected.item() if groups.last_stage else 0.0
    mine = [matrix.grad for matrix in whole[rank::pp]]
    return {
        "loss": loss.item(),
        "loss off": abs(loss.item() - known),
        "evaluated off": abs(evaluated.item() - known),
        "gradient off": max(
            (layer.weight.grad - grad).abs().max().item()
            for layer, grad in zip(layers, mine, strict=True)
        ),
    }


def gpt_matches(runs: list[tuple[dict[str, Any], int]]) -> list[dict[str, float]]:
    """For each (ParallelConfig arguments, micro-batches), the largest relative differences.

    Of the loss, of an evaluation's loss and of all gradients of a GPT, to the whole model on one
    process. Relative to the largest number of the tensor. "tied" is a key of the model's.
    """
    groups = make(1, dist.get_world_size(), 1)
    return [_gpt_matches(dict(arguments), count, groups) for arguments, count in runs]


def _gpt_matches(arguments: dict[str, Any], count: int, groups: ProcessGroups) -> dict[str, float]:
    tied = arguments.pop("tied")
    config = replace(GPT, tie_embeddings=tied)
    parallel = ParallelConfig(**arguments | {"schedule": Schedule(arguments["schedule"])})
    model = RankModel(config, parallel=parallel, train=TRAIN, groups=groups)
    whole = GPTStage(
        config,
        StageSpan(range(config.num_layers), first=True, last=True),
        axis=TensorAxis(),
        device=CPU,
        dtype=DType.float64,
        seed=TRAIN.seed,
    )
    generator = torch.Generator().manual_seed(count)
    batches = [
        MicroBatch(
            tokens=torch.randint(0, 32, (2, 9), generator=generator),
            samples=(2 * number, 2 * number + 1),
            step=0,
        )
        for number in range(count)
    ]
    message = Message(shape=(8, 2, config.hidden_size), dtype=torch.float64)
    evaluated = run_forward_pipeline(model.chunks, batches, message=message, groups=groups)
    loss = run_pipeline(
        model.chunks,
        batches,
        message=message,
        groups=groups,
        schedule=model.schedule,
        weight_gradients=model.weight_gradients,
    )
    tied = model.tied_parameter()
    sum_tied_gradient(None if tied is None else tied.grad, groups)
    expected = torch.stack([whole(None, batch) for batch in batches]).mean()
    expected.backward()
    known = expected.item() if groups.last_stage else 0.0
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    stored = {
        piece.parameter: piece.stored if piece.stored in gradients else piece.parameter
        for piece in model.pieces()
    }
    return {
        "parameters": sum(1 for _ in model.parameters()),
        "loss": abs(loss.item() - known),
        "evaluated": abs(evaluated.item() - known),
        "gradient": max(
            ((parameter.grad - expected).abs().max() / expected.abs().max()).item()
            for name, parameter in model.named_parameters()
            for expected in [gradients[stored[name]]]
        ),
    }


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
    message = Message(shape=(2, 4), dtype=torch.float64)
    run_pipeline([forward], inputs, message=message, groups=groups)
    groups.close()
    return alive


def sums() -> dict[str, Any]:
    """Gradients summed over 4 dp ranks, from buckets of two parameters each."""
    groups = make(1, 1, dist.get_world_size())
    parameters = [nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)) for _ in range(5)]
    buckets = GradientBuckets(parameters, group=groups.dp, bucket_bytes=2 * 6 * 8)
    for number, parameter in enumerate(parameters):
        parameter.grad.add_(number * 10.0 + groups.place.dp_rank)
    buckets.finish_sum()
    values = [parameter.grad.unique().tolist() for parameter in parameters]
    buckets.start_step()
    zeros = [parameter.grad.abs().max().item() for parameter in parameters]
    groups.close()
    return {"values": values, "zeros": zeros, "buckets": len(buckets.buffers)}


def sharded_sums() -> dict[str, Any]:
    """As `sums`, in buckets of two, each replica with what it owns; then a gather of updates."""
    groups = make(1, 1, dist.get_world_size())
    parameters = [nn.Parameter(torch.full((2, 3), float(number))) for number in range(5)]
    kept = [parameter.data_ptr() for parameter in parameters]
    sharding = ShardedParameters(
        parameters, group=groups.dp, apart=parameters[1], bucket_bytes=2 * 6 * 4
    )
    moved = [parameter.unique().tolist() for parameter in parameters]
    buckets = GradientBuckets(parameters, group=groups.dp, sharding=sharding)
    for number, parameter in enumerate(parameters):
        parameter.grad.add_(number * 10.0 + groups.place.dp_rank)
    buckets.finish_sum()
    owned = [buckets.owned(parameter.grad) for parameter in parameters]
    sums = [part.unique().tolist() for part in owned]
    for parameter in parameters:
        sharding.owned(parameter).add_(100.0 * groups.place.dp_rank)
    sharding.gather()
    groups.close()
    return {
        "moved": moved,
        "all moved": not set(kept) & {parameter.data_ptr() for parameter in parameters},
        "sums": sums,
        "owned": [part.numel() for part in owned],
        "buffers": [buffer.numel() for buffer in sharding.buffers],
        "gathered": [parameter.detach().flatten().tolist() for parameter in parameters],
    }


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
    if groups.place.dp_rank != 0:  # replicas have one norm together
        counted = []
    total = all_reduce(squared_norm(counted, device=CPU), groups.world).item()
    groups.close()
    return total
