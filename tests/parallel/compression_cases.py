"""What the ranks of test_compression do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from slurm_pt.parallel.buckets import in_buckets
from slurm_pt.parallel.gradient_buckets import GradientBuckets
from slurm_pt.parallel.groups import ProcessGroups
from slurm_pt.parallel.powersgd import PowerSGD
from slurm_pt.parallel.reduction import AllReduce
from tests.parallel.cases import DOUBLE, make

SHAPES = [(24, 16), (7,), (3, 5), (16, 2, 12), (40, 16)]
"""Two dims, one, too small to be compressed, three, and the first one reached by backward."""
RANK = 3


def on_four() -> dict[int, dict[str, Any]]:
    """All cases with four replicas, and with two of two tensor ranks each, by their number."""
    found = {}
    for layout in ((1, 1, 4), (2, 1, 2)):
        groups = make(*layout)
        found[groups.layout.dp] = {
            "halves": halves(groups),
            "torch": differences_from_torch(groups),
            "low rank": low_rank_gradients(groups),
            "not kept": steps_that_do_not_count(groups),
            "start": first_steps(groups),
            "not finite": not_finite(groups),
        }
        groups.close()
    return found


def gradient(step: int, groups: ProcessGroups, shape: tuple[int, ...]) -> Tensor:
    """This replica's gradient of a step: of a common part and its own."""
    common = torch.Generator().manual_seed(step // 2)
    own = torch.Generator().manual_seed(100 * step + groups.place.dp_rank)
    return torch.randn(shape, generator=common, dtype=torch.float64) + 0.3 * torch.randn(
        shape, generator=own, dtype=torch.float64
    )


def make_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, **DOUBLE)) for shape in SHAPES]


def make_powersgd(
    groups: ProcessGroups, *, start_step: int = 0
) -> tuple[list[nn.Parameter], PowerSGD, GradientBuckets]:
    parameters = make_parameters()
    reduction = PowerSGD(in_buckets(parameters), group=groups.dp, rank=RANK, start_step=start_step)
    buckets = GradientBuckets(parameters, group=groups.dp, reduction=reduction)
    return parameters, reduction, buckets


def run_step(
    step: int,
    parameters: list[nn.Parameter],
    buckets: GradientBuckets,
    groups: ProcessGroups,
    factor: float = 1.0,
) -> Tensor:
    """The mean gradient of a step as the buckets sum it, flat."""
    buckets.start_step(step)
    for index, parameter in enumerate(parameters):
        share = gradient(step * len(SHAPES) + index, groups, SHAPES[index]) / groups.layout.dp
        parameter.grad.add_(factor * share)
    buckets.finish_sum()
    return torch.cat([parameter.grad.flatten() for parameter in parameters])


def exact_mean(step: int, groups: ProcessGroups) -> Tensor:
    flat = torch.cat(
        [
            gradient(step * len(SHAPES) + index, groups, shape).flatten()
            for index, shape in enumerate(SHAPES)
        ]
    )
    dist.all_reduce(flat, group=groups.dp)
    return flat / groups.layout.dp


def halves(groups: ProcessGroups) -> dict[str, tuple[float, bool, torch.dtype]]:
    """Relative error of a sum in each 16-bit format, and whether all ranks have the same one."""
    found = {}
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        parameters = make_parameters()
        reduction = AllReduce(groups.dp, dtype)
        buckets = GradientBuckets(parameters, group=groups.dp, reduction=reduction)
        summed, exact = run_step(1, parameters, buckets, groups), exact_mean(1, groups)
        held = [torch.empty_like(summed) for _ in range(groups.layout.dp)]
        dist.all_gather(held, summed, group=groups.dp)
        same = all(torch.equal(other, held[0]) for other in held)
        error = ((summed - exact).norm() / exact.norm()).item()
        found[name] = error, same, summed.dtype
    return found


@dataclass
class OneBucket:
    """What torch's communication hooks ask of DDP's GradBucket."""

    flat: Tensor
    shapes: list[tuple[int, ...]]

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        parts = self.flat.split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def differences_from_torch(groups: ProcessGroups) -> list[float]:
    """How far each of some steps is from torch's PowerSGD, which begins with the same factors."""
    parameters, reduction, buckets = make_powersgd(groups)
    # Its defaults but for the rank; QR, as here, instead of Gram-Schmidt.
    theirs = torch_powersgd.PowerSGDState(
        groups.dp, RANK, start_powerSGD_iter=2, orthogonalization_epsilon=0
    )
    theirs.iter = 2
    shapes = SHAPES[::-1]
    compressed = [shape for shape in shapes if len(shape) > 1 and shape != (3, 5)]
    rows = sum(shape[0] for shape in compressed)
    theirs.p_memory_dict[0] = torch.zeros(rows * RANK, **DOUBLE)
    theirs.q_memory_dict[0] = reduction.state()["powersgd/q/0"].clone()
    found = []
    for step in range(6):
        ours = run_step(step, parameters, buckets, groups)
        reduction.keep()
        numbers = [step * len(SHAPES) + index for index in range(len(SHAPES))][::-1]
        flat = torch.cat(
            [
                gradient(number, groups, shape).flatten()
                for number, shape in zip(numbers, shapes, strict=True)
            ]
        )
        bucket = OneBucket(flat, shapes)
        torch_powersgd.powerSGD_hook(theirs, bucket).wait()
        mean = torch.cat([part.flatten() for part in reversed(bucket.gradients())])
        found.append((ours - mean).abs().max().item())
        error = theirs.error_dict[0]
        kept = torch.cat(
            [
                part.flatten()
                for part, shape in zip(OneBucket(error, shapes).gradients(), shapes, strict=True)
                if shape in compressed
            ]
        )
        found.append((reduction.state()["powersgd/error/0"] - kept).abs().max().item())
    return found


def low_rank_gradients(groups: ProcessGroups) -> float:
    """How far a sum is from the exact one, of gradients whose rank is that of the factors."""
    parameter = nn.Parameter(torch.zeros(24, 16, **DOUBLE))
    reduction = PowerSGD([[parameter]], group=groups.dp, rank=RANK, start_step=0)
    buckets = GradientBuckets([parameter], group=groups.dp, reduction=reduction)
    buckets.start_step(0)
    own = gradient(3, groups, (24, RANK)) @ gradient(4, groups, (RANK, 16))
    own = own if groups.place.dp_rank == 0 else torch.zeros_like(own)
    parameter.grad.add_(own)
    dist.all_reduce(own, group=groups.dp)
    buckets.finish_sum()
    return (parameter.grad - own).abs().max().item()


def steps_that_do_not_count(groups: ProcessGroups) -> tuple[bool, bool]:
    """Whether a step that is made again gives the same, and one after a step that counts not."""
    parameters, reduction, buckets = make_powersgd(groups)
    first = run_step(0, parameters, buckets, groups)
    run_step(1, parameters, buckets, groups, factor=1e3)  # never kept
    again = run_step(0, parameters, buckets, groups)
    reduction.keep()
    after = run_step(0, parameters, buckets, groups)
    return torch.equal(first, again), torch.equal(first, after)


def first_steps(groups: ProcessGroups) -> list[bool]:
    """Whether each of four steps is exact when factors are sent from the third on."""
    parameters, reduction, buckets = make_powersgd(groups, start_step=2)
    found = []
    for step in range(4):
        summed, exact = run_step(step, parameters, buckets, groups), exact_mean(step, groups)
        reduction.keep()
        found.append(torch.allclose(summed, exact, rtol=1e-12, atol=1e-12))
    return found


def not_finite(groups: ProcessGroups) -> bool:
    """Whether a NaN on one rank reaches all of them."""
    parameters, _, buckets = make_powersgd(groups)
    own = float("nan") if groups.place.dp_rank == 0 else 1.0
    return bool(run_step(0, parameters, buckets, groups, factor=own).isnan().all())
