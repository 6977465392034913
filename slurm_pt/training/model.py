"""One pipeline stage of a GPT-2: what a rank holds of the model, and how it starts.

Three things do not depend on the layout: a parameter's name (it carries the layer's index in
the whole model), its initial value (drawn on the full shape, then sliced), and the dropout
masks (a function of the sample, not of a random state).

Source: Radford et al. 2019 (GPT-2); openai/gpt-2 `src/model.py`; Hugging Face `GPT2LMHeadModel`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_pt.config.schema import DType, ModelConfig
from slurm_pt.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel_linear,
    vocab_parallel_cross_entropy,
)

if TYPE_CHECKING:
    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.parallel.weight_gradients import WeightGradients

TOKEN_EMBEDDING = "embedding.tokens.weight"  # noqa: S105 (a name, not a secret)
HEAD = "head.weight"


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass on one rank."""

    tokens: Tensor
    """int64 [batch, seq + 1]: inputs and, shifted by one, targets. Empty on stages between."""
    samples: tuple[int, ...]
    """The samples' indices, counted from the start of the run: step * global batch + i."""
    step: int


def compute_dtype(dtype: DType) -> torch.dtype:
    """The format of the activations, and of what crosses stages."""
    formats: dict[str, torch.dtype] = {
        "float32": torch.float32,
        "float64": torch.float64,
        "bfloat16": torch.bfloat16,
    }
    return formats[dtype.value]


def parameter_dtype(dtype: DType) -> torch.dtype:
    """The format of weights, gradients and moments: never less than float32.

    With bfloat16 the weights are cast for each use, since updates below 1/256 of a bfloat16
    weight would be lost.
    """
    return torch.float64 if dtype is DType.float64 else torch.float32


class GPTStage(nn.Module):
    """Some consecutive layers, with the embeddings on the first stage and the head on the last.

    `forward` takes what the stage before sent, [batch, seq, hidden] (None on the first stage),
    and gives the same, or on the last stage the mean loss of the micro-batch.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: range,
        first: bool,
        last: bool,
        groups: ProcessGroups,
        dtype: DType,
        seed: int,
        weight_gradients: WeightGradients | None = None,
    ):
        super().__init__()
        self.config = config
        self.weight_gradients = weight_gradients
        self.groups = groups
        self.seed = seed
        self.dtype = compute_dtype(dtype)
        kind: dict[str, Any] = {"device": groups.device, "dtype": parameter_dtype(dtype)}
        self.embedding = Embedding(config, groups, seed=seed, **kind) if first else None
        # Keyed by the index in the whole model: names are the same in every layout.
        self.layers = nn.ModuleDict(
            {
                str(index): Layer(
                    config, index, groups, seed=seed, weight_gradients=weight_gradients, **kind
                )
                for index in layers
            }
        )
        self.final_norm = LayerNorm(config.hidden_size, **kind) if last else None
        tied_here = config.tie_embeddings and first and last
        self.head = (
            ColumnParallelLinear(
                config.hidden_size, config.vocab_size, group=groups.tp, bias=False, **kind
            )
            if last and not tied_here
            else None
        )
        self._initialise()

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(micro_batch).to(self.dtype)
        if hidden is None:
            raise ValueError("a stage without embeddings needs the output of the one before")
        for layer in self.layers.values():
            hidden = layer(hidden, micro_batch)  # [batch, seq, hidden]
        if self.final_norm is None:
            return hidden
        return self.losses(hidden, micro_batch).mean()

    def losses(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The loss of each token, [batch, seq], from the last layer's output."""
        targets = micro_batch.tokens[:, 1:]
        return vocab_parallel_cross_entropy(self.logits(hidden), targets, group=self.groups.tp)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's part of the logits, [batch, seq, vocab / tp]."""
        if self.final_norm is None:
            raise ValueError("only the last stage makes logits")
        head = self.embedding.tokens if self.head is None and self.embedding else self.head
        if head is None:
            raise ValueError("the last stage has lost its head")
        return column_parallel_linear(
            self.final_norm(hidden),
            head.weight,
            None,
            group=self.groups.tp,
            weight_gradients=self.weight_gradients,
        )

    def shard_dims(self) -> dict[str, int | None]:
        """The dimension along which each parameter is split over tp; None: whole on each rank."""
        dims: dict[str, int | None] = {}
        for prefix, module in self.named_modules():
            split = isinstance(
                module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding
            )
            for name, _ in module.named_parameters(recurse=False):
                dims[f"{prefix}.{name}"] = module.shard_dims[name] if split else None
        return dims

    def checkpoint_names(self) -> dict[str, str]:
        """The name under which each parameter is stored: its own, but for tied copies."""
        copies = self.tied_copies()
        return {
            name: TOKEN_EMBEDDING if name in copies else name for name, _ in self.named_parameters()
        }

    def tied_copies(self) -> frozenset[str]:
        """The parameters that are copies of one on another stage: load them, but do not save."""
        tied = self.config.tie_embeddings and self.head is not None
        return frozenset({HEAD}) if tied else frozenset()

    def tied_parameter(self) -> nn.Parameter | None:
        """This rank's copy of a token embedding that two stages hold; None if none does."""
        if not self.config.tie_embeddings or self.groups.layout.pp == 1:
            return None
        if self.head is not None:
            return self.head.weight
        return None if self.embedding is None else self.embedding.tokens.weight

    @torch.no_grad()
    def _initialise(self) -> None:
        """Initial weights as GPT-2's: normal, residual outputs scaled down, biases 0, norms 1.

        Each parameter is drawn on its full shape and in float32 on the CPU from a generator
        seeded by (seed, stored name), then sliced: the same in any layout, on any device.
        """
        residual_std = self.config.init_std / math.sqrt(2 * self.config.num_layers)
        dims, stored = self.shard_dims(), self.checkpoint_names()
        tp, tp_rank = self.groups.layout.tp, self.groups.place.tp_rank
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            if name.endswith("bias"):
                parameter.zero_()
                continue
            dim = dims[name]
            shape = [
                size * tp if axis == dim else size for axis, size in enumerate(parameter.shape)
            ]
            generator = torch.Generator().manual_seed(seed_of(self.seed, stored[name]))
            full = torch.empty(shape, dtype=torch.float32)
            residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
            std = residual_std if residual else self.config.init_std
            full.normal_(0.0, std, generator=generator)
            parameter.copy_(full if dim is None else full.chunk(tp, dim)[tp_rank])


class Embedding(nn.Module):
    """Token plus learned position embeddings."""

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.dropout = SampleDropout(config.dropout, seed=seed, site="embedding")
        self.tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, group=groups.tp, device=device, dtype=dtype
        )
        self.positions = nn.Embedding(
            config.max_seq_len, config.hidden_size, device=device, dtype=dtype
        )

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        inputs = micro_batch.tokens[:, :-1]  # [batch, seq]
        hidden = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        dropped: Tensor = self.dropout(hidden, micro_batch)  # [batch, seq, hidden]
        return dropped


class Layer(nn.Module):
    """Pre-LayerNorm: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        groups: ProcessGroups,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        weight_gradients: WeightGradients | None = None,
    ):
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention_norm = LayerNorm(config.hidden_size, **kind)
        self.attention = Attention(config, groups, weight_gradients=weight_gradients, **kind)
        self.attention_dropout = SampleDropout(
            config.dropout, seed=seed, site=f"layers.{index}.attention"
        )
        self.ffn_norm = LayerNorm(config.hidden_size, **kind)
        self.ffn = FeedForward(config, groups, weight_gradients=weight_gradients, **kind)
        self.ffn_dropout = SampleDropout(config.dropout, seed=seed, site=f"layers.{index}.ffn")

    def forward(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        attended = self.attention(self.attention_norm(hidden))
        hidden = hidden + self.attention_dropout(attended, micro_batch)
        fed = self.ffn(self.ffn_norm(hidden))
        output: Tensor = hidden + self.ffn_dropout(fed, micro_batch)
        return output


class Attention(nn.Module):
    """Causal self-attention over this rank's heads.

    Rows of the fused weight are ordered head by head (q, k, v of head 0, then of head 1, ...):
    a shard over tp is a contiguous part of the full matrix.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
        weight_gradients: WeightGradients | None = None,
    ):
        super().__init__()
        hidden = config.hidden_size
        if hidden % config.num_heads or config.num_heads % groups.layout.tp:
            raise ValueError(f"{config.num_heads} heads do not divide {hidden}, or not over tp")
        self.head_size = hidden // config.num_heads
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        kind |= {"group": groups.tp, "weight_gradients": weight_gradients}
        self.qkv = ColumnParallelLinear(hidden, 3 * hidden, **kind)
        self.output = RowParallelLinear(hidden, hidden, **kind)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = fused.transpose(1, 2).unbind(3)  # [batch, heads / tp, seq, head]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
        weight_gradients: WeightGradients | None = None,
    ):
        super().__init__()
        hidden, wide = config.hidden_size, config.ffn_size
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        kind |= {"group": groups.tp, "weight_gradients": weight_gradients}
        self.up = ColumnParallelLinear(hidden, wide, **kind)
        self.down = RowParallelLinear(wide, hidden, **kind)

    def forward(self, x: Tensor) -> Tensor:
        wide = functional.gelu(self.up(x), approximate="tanh")  # [batch, seq, ffn / tp]
        output: Tensor = self.down(wide)
        return output


class LayerNorm(nn.LayerNorm):
    """torch's, with weights cast to the format of the input."""

    def __init__(self, size: int, *, device: torch.device, dtype: torch.dtype):
        super().__init__(size, eps=1e-5, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SampleDropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, sample, site) alone.

    So it is the same in any layout, in a recomputed forward pass and after a resume, and no
    random state has to be saved. All tp ranks draw the whole mask.
    """

    def __init__(self, probability: float, *, seed: int, site: str):
        super().__init__()
        self.probability = probability
        self.seed = seed
        self.site = site

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:  # [batch, seq, hidden]
        if self.probability == 0.0:
            return x
        generator = torch.Generator(device=x.device)
        uniform = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for row, sample in enumerate(micro_batch.samples):
            generator.manual_seed(seed_of(self.seed, micro_batch.step, sample, self.site))
            uniform[row].uniform_(generator=generator)
        dropped = uniform < self.probability
        return x.masked_fill(dropped, 0.0) * (1.0 / (1.0 - self.probability))


def seed_of(*parts: int | str) -> int:
    """A 32-bit seed from anything that identifies what is drawn (the CPU generator uses 32)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
