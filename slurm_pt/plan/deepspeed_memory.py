"""Bytes of weights, gradients and optimizer state on one rank under DeepSpeed's ZeRO.

DeepSpeed updates float32 copies of the weights also where the weights themselves are float32: 12
bytes a number with AdamW's two moments, which all stages share out over dp. Matrices and vectors
are two groups of parameters, since only the first decay.

Padding: stages 1 and 2 lay a group's parameters in one row, and fill it up to a multiple of 2 dp
numbers (a rank's part then begins at a multiple of 4 bytes in 16-bit formats). Stage 3 cuts each
parameter by itself, and fills it up to a multiple of dp.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; the padding is DeepSpeed 0.19.8's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OPTIMIZER_BYTES = 12
"""Of one number: float32 weight and two moments."""
GRADIENT_BYTES = 4
"""Of one number: gradients are summed in float32."""


@dataclass(frozen=True)
class ZeroBytes:
    """What one rank holds."""

    weights: int
    gradients: int
    """As they are summed over the micro-batches of a step."""
    optimizer: int
    """In host memory with train.offload_optimizer."""


def zero_bytes(
    groups: Sequence[Sequence[int]],
    *,
    stage: int,
    dp: int,
    dp_rank: int = 0,
    weight_bytes: int = 4,
    persistent_numbers: int = 0,
) -> ZeroBytes:
    """The bytes on a rank, for the sizes of the parameters (numbers) that a tensor rank holds.

    Args:
        groups: matrices and vectors, in the model's order.
        stage: of ZeRO, 1 to 3.
        dp: replicas that share the state.
        dp_rank: which of them; it matters for stage 2's gradients alone.
        weight_bytes: of one weight; 2 in bfloat16.
        persistent_numbers: stage 3 keeps smaller parameters whole beside their parts.

    >>> zero_bytes([[10, 4], [3]], stage=1, dp=2)
    ZeroBytes(weights=80, gradients=68, optimizer=120)
    >>> zero_bytes([[10, 4], [3]], stage=3, dp=2)
    ZeroBytes(weights=36, gradients=36, optimizer=108)
    """
    sizes = [size for group in groups for size in group]
    if stage == 3:
        own = sum(_up(size, dp) // dp for size in sizes)
        whole = sum(size for size in sizes if size < persistent_numbers)
        return ZeroBytes(weight_bytes * (own + whole), GRADIENT_BYTES * own, OPTIMIZER_BYTES * own)
    rows = [_up(sum(group), 2 * dp) for group in groups]
    own = sum(rows) // dp
    summed = sum(sizes)
    if stage == 2:
        summed = sum(
            _touched(group, range(dp_rank * row // dp, (dp_rank + 1) * row // dp))
            for group, row in zip(groups, rows, strict=True)
        )
    return ZeroBytes(weight_bytes * sum(rows), GRADIENT_BYTES * summed, OPTIMIZER_BYTES * own)


def _up(numbers: int, multiple: int) -> int:
    return -(-numbers // multiple) * multiple


def _touched(group: Sequence[int], part: range) -> int:
    """Numbers of the parameters in a row that a part of it touches: each gradient is kept whole."""
    total = begin = 0
    for size in group:
        if begin < part.stop and begin + size > part.start:
            total += size
        begin += size
    return total
