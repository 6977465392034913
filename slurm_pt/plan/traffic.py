"""How many bytes a rank sends in one step, by what they are for. Pure arithmetic.

Bytes on the wire of ring algorithms: an all-reduce of S bytes over n ranks sends 2 (n - 1) / n S
from each, a gather or a scatter of S bytes in all (n - 1) / n S, a message its own size.

Sources: Narayanan et al. 2021, arXiv:2104.04473, sections 3.2 and 4.1 (tensor and pipeline);
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (split sequence); Rajbhandari et al. 2020,
arXiv:1910.02054, section 7 (ZeRO); Vogels et al. 2019, arXiv:1905.13727 (factors of low rank);
Douillard et al. 2023, arXiv:2311.08105 (local updates).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LEAST_SAVING = 2
"""A matrix is sent as factors if they are at least this many times smaller (the same as torch's
PowerSGD)."""


@dataclass(frozen=True)
class StageShape:
    """What one rank holds of the model.

    With ZeRO, the whole, shared and tied parameters are those that the rank owns: about 1/dp.
    """

    layers: int
    has_embedding: bool
    has_head: bool
    parameters: int
    """Trained on this rank, tied copies included."""
    whole_parameters: int = 0
    """Of those: the same on every tensor rank (norms, biases of row-parallel layers, positions; of
    an adapter the factor that is not split)."""
    shared_parameters: int = 0
    """Of those: heads of keys and values that neighbouring tensor ranks hold too."""
    tied_parameters: int = 0
    """Of those: the token embedding, where another stage holds a copy."""
    padding: int = 0
    """With ZeRO: what fills each bucket up to a multiple of dp, less than dp numbers a bucket."""
    frozen: bool = False
    """Adapters alone are trained, and some of them sit on query, key or value."""
    adapter_ranks: int = 0
    """Of one layer: the rank, for each adapter of a column-parallel output."""


@dataclass(frozen=True)
class StepShape:
    """What one step of one rank works on."""

    num_microbatches: int
    micro_batch_size: int
    seq_len: int
    hidden_size: int
    activation_bytes: int
    """Of one number."""
    loss_bytes: int = 4
    """Of one logit, as the loss is computed."""
    gradient_bytes: int = 4
    """Of one number."""
    weight_bytes: int = 4
    """Of one number."""

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch_size * self.seq_len

    @property
    def hidden_bytes(self) -> int:
        """Of the residual stream of a micro-batch, whole."""
        return self.activation_bytes * self.tokens * self.hidden_size


def all_reduce_bytes(size_bytes: float, ranks: int) -> float:
    """Sent by each rank.

    >>> all_reduce_bytes(100, 4), all_reduce_bytes(100, 1)
    (150.0, 0.0)
    """
    return 2 * (ranks - 1) / ranks * size_bytes


def gather_bytes(size_bytes: float, ranks: int) -> float:
    """Sent by each rank in an all-gather to, or a reduce-scatter of, so many bytes.

    >>> gather_bytes(100, 4)
    75.0
    """
    return (ranks - 1) / ranks * size_bytes


def tensor_bytes(stage: StageShape, step: StepShape, *, tp: int, sequence: bool) -> float:
    """Over the tensor group: four exchanges of the residual stream a layer and micro-batch.

    Two forward, two backward: all-reduces, or with a split sequence a gather and a scatter each,
    and two more gathers for the weight gradients. The embedding has one forward, the head one
    backward, the loss three numbers a token.

    Frozen weights need no gathers for their gradients, but a scatter of what adapters give within;
    and nothing goes back to the embedding. The gradients of whole parameters are summed once.
    """
    if tp == 1:
        return 0.0
    whole = step.hidden_bytes
    both = all_reduce_bytes(whole, tp)  # as much as a gather and a scatter
    per_micro_batch = 4 * both * stage.layers
    if sequence and stage.frozen:
        within = step.activation_bytes * step.tokens * stage.adapter_ranks
        per_micro_batch += gather_bytes(within, tp) * stage.layers
    elif sequence:
        per_micro_batch += 2 * gather_bytes(whole, tp) * stage.layers
    if stage.has_embedding:
        per_micro_batch += both  # with a split sequence: a scatter forward, a gather backward
        if stage.frozen:  # neither that gather, nor the first layer's reduction
            per_micro_batch -= both
    if stage.has_head:
        per_micro_batch += both
        if sequence and not stage.frozen:
            per_micro_batch += gather_bytes(whole, tp)
        per_micro_batch += all_reduce_bytes(3 * step.loss_bytes * step.tokens, tp)
    partial = stage.whole_parameters if sequence or stage.frozen else 0
    once = all_reduce_bytes(step.gradient_bytes * partial, tp)
    return step.num_microbatches * per_micro_batch + once


def shared_head_bytes(stage: StageShape, step: StepShape, *, sharing: int) -> float:
    """Over the ranks that hold the same heads of keys and values: their gradients, once a step."""
    return all_reduce_bytes(step.gradient_bytes * stage.shared_parameters, sharing)


def pipeline_bytes(step: StepShape, *, sends: int, tp: int, sequence: bool) -> float:
    """To the neighbouring stages: `sends` messages a micro-batch (0 to 2 for each chunk)."""
    message = step.hidden_bytes / (tp if sequence else 1)
    return step.num_microbatches * sends * message


def data_bytes(
    stage: StageShape, step: StepShape, *, dp: int, zero: int = 0, number_bytes: int | None = None
) -> float:
    """Over the replicas: all gradients of the rank, once a step.

    With ZeRO stage 1 they are scattered, and the updated weights are gathered. With fp16 or bf16
    compression `number_bytes` is 2.
    """
    if zero == 0:
        return all_reduce_bytes((number_bytes or step.gradient_bytes) * stage.parameters, dp)
    numbers = stage.parameters + stage.padding
    return gather_bytes((step.gradient_bytes + step.weight_bytes) * numbers, dp)


def powersgd_bytes(
    shapes: Iterable[Sequence[int]], step: StepShape, *, dp: int, rank: int
) -> float:
    """Over the replicas, once a step: the gradients of parameters of these shapes as factors."""
    numbers = sum(_factor_numbers(shape, rank) for shape in shapes)
    return all_reduce_bytes(step.gradient_bytes * numbers, dp)


def local_update_bytes(stage: StageShape, step: StepShape, *, dp: int, local_steps: int) -> float:
    """Over the replicas: all weights of the rank, once in so many steps; the mean of a step."""
    return all_reduce_bytes(step.gradient_bytes * stage.parameters, dp) / local_steps


def low_rank(shape: Sequence[int], rank: int) -> int | None:
    """Columns of the factors that PowerSGD sends for a parameter; None: it is sent as it is.

    >>> low_rank((768, 768), 4), low_rank((768, 2), 4), low_rank((768,), 4)
    (4, None, None)
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rank, rows, columns)
    return rank if LEAST_SAVING * rank * (rows + columns) <= rows * columns else None


def _factor_numbers(shape: Sequence[int], rank: int) -> int:
    """How many numbers are sent for one parameter."""
    columns = low_rank(shape, rank)
    if columns is None:
        return math.prod(shape)
    return columns * (shape[0] + math.prod(shape[1:]))


def tied_bytes(stage: StageShape, step: StepShape) -> float:
    """Between the first and the last stage: the gradient of the token embedding, once a step."""
    return all_reduce_bytes(step.gradient_bytes * stage.tied_parameters, 2)
