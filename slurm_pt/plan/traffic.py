"""How many bytes a rank sends in one step, by what they are for. Pure arithmetic.

Bytes on the wire of ring algorithms: an all-reduce of S bytes over n ranks sends 2 (n - 1) / n S
from each, a gather or a scatter of S bytes in all (n - 1) / n S, a message its own size.

Sources: Narayanan et al. 2021, arXiv:2104.04473, sections 3.2 and 4.1 (tensor and pipeline);
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (split sequence).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageShape:
    """What one rank holds of the model."""

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


def data_bytes(stage: StageShape, step: StepShape, *, dp: int) -> float:
    """Over the replicas: all gradients of the rank, once a step."""
    return all_reduce_bytes(step.gradient_bytes * stage.parameters, dp)


def tied_bytes(stage: StageShape, step: StepShape) -> float:
    """Between the first and the last stage: the gradient of the token embedding, once a step."""
    return all_reduce_bytes(step.gradient_bytes * stage.tied_parameters, 2)
