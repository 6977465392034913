"""One pipeline stage of a causal transformer: what a rank holds of the model, and how it starts.

Three things do not depend on the layout: the name and shape under which a tensor is stored (the
name carries the layer's index in the whole model), its initial value (drawn on the full shape,
then sliced), and the dropout masks (a function of the sample, not of a random state).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slurm_pt.config.choices import DType, Recompute
from slurm_pt.config.schema import LoraConfig, ModelConfig
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.low_rank import LowRankUpdate
from slurm_pt.parallel.model_part import Piece, pieces_of, shared_gradients
from slurm_pt.parallel.product import parallel_linear
from slurm_pt.parallel.shard import WHOLE
from slurm_pt.parallel.tensor import ColumnParallelLinear
from slurm_pt.parallel.vocabulary import vocab_parallel_cross_entropy
from slurm_pt.training.dropout import seed_of
from slurm_pt.training.layers import NO_LORA, Build, Embedding, Layer
from slurm_pt.training.micro_batch import MicroBatch

TOKEN_EMBEDDING = "embedding.tokens.weight"  # noqa: S105 (a name, not a secret)
HEAD = "head.weight"


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
        lora: LoraConfig = NO_LORA,
        initialise: bool = True,
        offload_embedding: bool = False,
    ):
        super().__init__()
        self.config, self.span, self.axis, self.seed = config, span, axis, seed
        self.dtype = compute_dtype(dtype)
        self.has_adapters = lora.rank is not None
        build = Build(
            config, axis, seed, device, parameter_dtype(dtype), recompute, lora, offload_embedding
        )
        self.embedding = Embedding(build) if span.first else None
        self.layers = _layers(build, span.layers)
        self.final_norm = build.norm() if span.last else None
        tied_here = config.tie_embeddings and span.first and span.last
        self.head = (
            ColumnParallelLinear(
                config.hidden_size, config.vocab_size, axis=axis, bias=False, **build.kind
            )
            if span.last and not tied_here
            else None
        )
        if self.has_adapters:
            _freeze_all_but_adapters(self)
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
        return parallel_linear(
            self.final_norm(hidden), head.weight, None, axis=self.axis, shared=True
        )

    def message_shape(self, *, micro_batch_size: int, seq_len: int) -> tuple[int, int, int]:
        """What crosses stages for one micro-batch."""
        places = self.axis.own_positions(seq_len)
        return (places.stop - places.start, micro_batch_size, self.config.hidden_size)

    # ------------------------------------------------------------------- what is stored, and how

    def pieces(self) -> list[Piece]:
        """All of this rank's parameters, cut into what is stored under names of its own."""
        copies = self.tied_copies()
        return [
            piece._replace(stored=TOKEN_EMBEDDING) if piece.parameter in copies else piece
            for piece in pieces_of(self)
        ]

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
        """The whole parameters of which each tensor rank knows a part of the gradient alone.

        That of its part of the sequence, where it is split; and for an adapter's whole factor that
        of its own features. Sum them over the tensor group, once a step.
        """
        if not (self.axis.splits_sequence or (self.has_adapters and self.axis.tp > 1)):
            return []
        whole = {piece.parameter for piece in self.pieces() if piece.shard == WHOLE}
        named = self.named_parameters()
        return [held for name, held in named if name in whole and held.requires_grad]

    def shared_gradients(self) -> list[Tensor]:
        """The gradients of what several tensor ranks hold for different query heads.

        Sum them over the ranks that share a key/value head (`ProcessGroups.kv`), once a step.
        """
        return shared_gradients(self, tp=self.axis.tp)

    @torch.no_grad()
    def _initialise(self) -> None:
        parameters = dict(self.named_parameters())
        for piece in self.pieces():
            local = piece.of(parameters[piece.parameter])
            local.copy_(self.initial_value(piece, local.shape))

    def initial_value(self, piece: Piece, shape: torch.Size) -> Tensor:
        """What a piece of this local shape begins with, float32 on the CPU.

        As GPT-2's: normal, residual outputs scaled down, biases 0, norms 1. Of an adapter's factors
        B is 0, so that at first it gives 0. Each tensor is drawn on its full shape from a generator
        seeded by (seed, stored name), then sliced: the same in any layout, on any device.
        """
        if "norm" in piece.stored:
            return torch.full(shape, 1.0 if piece.stored.endswith("weight") else 0.0)
        if piece.stored.endswith(("bias", "lora_b")):
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(seed_of(self.seed, piece.stored))
        full = torch.empty(piece.shard.whole_shape(shape), dtype=torch.float32)
        std = self.config.init_std
        if piece.stored.endswith("lora_a"):
            std = 1.0 / math.sqrt(3 * full.shape[1])  # that of the authors' uniform draw
        elif piece.stored.endswith(("attention.output.weight", "ffn.down.weight")):
            std /= math.sqrt(2 * self.config.num_layers)
        full.normal_(0.0, std, generator=generator)
        return full[piece.shard.slices(shape)]


def _layers(build: Build, span: range) -> nn.ModuleDict:
    """The layers by their index in the whole model: names are the same in every layout.

    Of those that share weights the first one's name is stored.
    """
    made: dict[str, Layer] = {}
    for index in span:
        first = index - index % build.config.share_layers
        made[str(index)] = Layer(build, index, made.get(str(first)))
    return nn.ModuleDict(made)


def _freeze_all_but_adapters(stage: nn.Module) -> None:
    stage.requires_grad_(False)
    for module in stage.modules():
        if isinstance(module, LowRankUpdate):
            module.requires_grad_(True)
