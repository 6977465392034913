"""One pipeline stage of a causal transformer: what a rank holds of the model, and how it starts.

Three things do not depend on the layout: the name and shape under which a tensor is stored (the
name carries the layer's index in the whole model), its initial value (drawn on the full shape,
then sliced), and the dropout masks (a function of the sample, not of a random state).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from slurm_pt.config.choices import DType, Recompute
from slurm_pt.config.schema import ModelConfig
from slurm_pt.parallel.axis import StoredPart, TensorAxis
from slurm_pt.parallel.shard import WHOLE, Shard
from slurm_pt.parallel.tensor import ColumnParallelLinear, RowParallelLinear, column_parallel_linear
from slurm_pt.parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from slurm_pt.training.dropout import seed_of
from slurm_pt.training.layers import Build, Embedding, Layer
from slurm_pt.training.micro_batch import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN_EMBEDDING = "embedding.tokens.weight"  # noqa: S105 (a name, not a secret)
HEAD = "head.weight"
SPLIT_LAYERS = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


def compute_dtype(dtype: DType) -> torch.dtype:
    """The format of the activations, and of what crosses stages."""
    formats: dict[str, torch.dtype] = {
        "float32": torch.float32,
        "float64": torch.float64,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    return formats[dtype.value]


def parameter_dtype(dtype: DType) -> torch.dtype:
    """The format of weights, gradients and moments: never less than float32.

    With 16-bit activations the weights are cast for each use: updates below 1/256 of a bfloat16
    weight would be lost.
    """
    return torch.float64 if dtype is DType.float64 else torch.float32


class Piece(NamedTuple):
    """A part of a parameter that is stored, and initialised, as a tensor of its own."""

    parameter: str
    rows: slice
    """Of the parameter, along dim 0."""
    stored: str
    """The name in checkpoints, the same in every layout."""
    shard: Shard

    def of(self, tensor: Tensor) -> Tensor:
        """The piece's view of the parameter, or of a tensor of its shape (gradient, moment)."""
        return tensor if self.rows == slice(None) else tensor[self.rows]


@dataclass(frozen=True)
class StageSpan:
    """Which part of the model a stage is."""

    layers: range
    first: bool
    """Has the embeddings."""
    last: bool
    """Has the final norm and the head."""


class GPTStage(nn.Module):
    """Some consecutive layers, with the embeddings on the first stage and the head on the last.

    `forward` takes what the stage before sent, [seq, batch, hidden] (None on the first stage),
    and gives the same, or on the last stage the mean loss of the micro-batch. With a split
    sequence, what crosses stages is a rank's part of it: [seq / tp, batch, hidden].
    """

    def __init__(
        self,
        config: ModelConfig,
        span: StageSpan,
        *,
        axis: TensorAxis,
        device: torch.device,
        dtype: DType,
        seed: int,
        recompute: Recompute = Recompute.none,
        initialise: bool = True,
    ):
        super().__init__()
        self.config, self.span, self.axis, self.seed = config, span, axis, seed
        self.dtype = compute_dtype(dtype)
        build = Build(config, axis, seed, device, parameter_dtype(dtype), recompute)
        self.embedding = Embedding(build) if span.first else None
        # Keyed by the index in the whole model: names are the same in every layout.
        self.layers = nn.ModuleDict({str(index): Layer(build, index) for index in span.layers})
        self.final_norm = build.norm() if span.last else None
        tied_here = config.tie_embeddings and span.first and span.last
        self.head = (
            ColumnParallelLinear(
                config.hidden_size, config.vocab_size, axis=axis, bias=False, **build.kind
            )
            if span.last and not tied_here
            else None
        )
        if initialise and device.type != "meta":
            self._initialise()

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        hidden = self.hidden(hidden, micro_batch)
        if self.final_norm is None:
            return hidden
        return self.losses(hidden, micro_batch).mean()

    def hidden(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """The output of this stage's last layer, [seq (/ tp), batch, hidden]."""
        if self.embedding is not None:
            hidden = self.embedding(micro_batch).to(self.dtype)
        if hidden is None:
            raise ValueError("a stage without embeddings needs the output of the one before")
        for layer in self.layers.values():
            hidden = layer(hidden, micro_batch)
        return hidden

    def losses(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The loss of each token, [seq, batch], from the last layer's output."""
        targets = micro_batch.tokens[:, 1:].t()
        return vocab_parallel_cross_entropy(self.logits(hidden), targets, axis=self.axis)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's part of the logits, [seq, batch, vocab / tp]."""
        if self.final_norm is None:
            raise ValueError("only the last stage makes logits")
        head = self.embedding.tokens if self.head is None and self.embedding else self.head
        if head is None:
            raise ValueError("the last stage has lost its head")
        return column_parallel_linear(self.final_norm(hidden), head.weight, None, axis=self.axis)

    def message_shape(self, *, micro_batch_size: int, seq_len: int) -> tuple[int, int, int]:
        """What crosses stages for one micro-batch."""
        places = self.axis.own_positions(seq_len)
        return (places.stop - places.start, micro_batch_size, self.config.hidden_size)

    # ------------------------------------------------------------------- what is stored, and how

    def pieces(self) -> list[Piece]:
        """All of this rank's parameters, cut into what is stored under names of its own."""
        copies = self.tied_copies()
        found = []
        for prefix, module in self.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                parameter = f"{prefix}.{name}" if prefix else name
                for part in _stored_parts(module, name):
                    stored = TOKEN_EMBEDDING if parameter in copies else _join(prefix, part.name)
                    found.append(Piece(parameter, part.rows, stored, part.shard))
        return found

    def tied_copies(self) -> frozenset[str]:
        """The parameters that are copies of one on another stage."""
        tied = self.config.tie_embeddings and self.head is not None
        return frozenset({HEAD}) if tied else frozenset()

    def tied_parameter(self) -> nn.Parameter | None:
        """This rank's copy of a token embedding that two stages hold; None if none does."""
        if not self.config.tie_embeddings or (self.span.first and self.span.last):
            return None
        if self.head is not None:
            return self.head.weight
        return None if self.embedding is None else self.embedding.tokens.weight

    def partial_gradients(self) -> list[nn.Parameter]:
        """The parameters whose gradient each tensor rank knows for its part of the sequence alone.

        Sum them over the tensor group, once a step. Empty unless the sequence is split.
        """
        if not self.axis.splits_sequence:
            return []
        whole = {piece.parameter for piece in self.pieces() if piece.shard == WHOLE}
        return [parameter for name, parameter in self.named_parameters() if name in whole]

    def shared_gradients(self) -> list[Tensor]:
        """The gradients of what several tensor ranks hold for different query heads.

        Sum them over the ranks that share a key/value head (`ProcessGroups.kv`), once a step.
        """
        parameters = dict(self.named_parameters())
        shared = []
        for piece in self.pieces():
            gradient = parameters[piece.parameter].grad
            is_shared = piece.shard != WHOLE and piece.shard.parts < self.axis.tp
            if is_shared and gradient is not None:
                shared.append(piece.of(gradient))
        return shared

    @torch.no_grad()
    def _initialise(self) -> None:
        parameters = dict(self.named_parameters())
        for piece in self.pieces():
            local = piece.of(parameters[piece.parameter])
            local.copy_(self.initial_value(piece, local.shape))

    def initial_value(self, piece: Piece, shape: torch.Size) -> Tensor:
        """What a piece of this local shape begins with, float32 on the CPU.

        As GPT-2's: normal, residual outputs scaled down, biases 0, norms 1. Each tensor is drawn
        on its full shape from a generator seeded by (seed, stored name), then sliced: the same in
        any layout, on any device.
        """
        if "norm" in piece.stored:
            return torch.full(shape, 1.0 if piece.stored.endswith("weight") else 0.0)
        if piece.stored.endswith("bias"):
            return torch.zeros(shape)
        residual = piece.stored.endswith(("attention.output.weight", "ffn.down.weight"))
        depth = math.sqrt(2 * self.config.num_layers) if residual else 1.0
        generator = torch.Generator().manual_seed(seed_of(self.seed, piece.stored))
        full = torch.empty(piece.shard.whole_shape(shape), dtype=torch.float32)
        full.normal_(0.0, self.config.init_std / depth, generator=generator)
        begin = piece.shard.offsets(shape)
        return full[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]


def _stored_parts(module: nn.Module, parameter: str) -> Iterator[StoredPart]:
    if isinstance(module, SPLIT_LAYERS):
        yield from module.stored_parts(parameter)
    else:
        yield StoredPart(parameter, slice(None), WHOLE)


def _join(prefix: str, name: str) -> str:
    """A name relative to a module, from the root; "../" leads to the module's parent."""
    while name.startswith("../"):
        prefix, name = prefix.rpartition(".")[0], name.removeprefix("../")
    return f"{prefix}.{name}" if prefix else name
