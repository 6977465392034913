"""The layers of a causal transformer, each rank with its heads and its part of the feed-forward.

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971 (Llama: RMSNorm,
SwiGLU, rotary positions); Ainslie et al. 2023, arXiv:2305.13245 (grouped-query attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from slurm_pt.config.choices import Activation, Bias, Norm, Positions, Recompute
from slurm_pt.config.schema import LoraConfig, ModelConfig
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.low_rank import LowRank
from slurm_pt.parallel.product import Prepare
from slurm_pt.parallel.tensor import ColumnParallelLinear, RowParallelLinear, Rows
from slurm_pt.parallel.vocabulary import VocabParallelEmbedding
from slurm_pt.training.dropout import SampleDropout
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.rotary import Rotary

NO_LORA = LoraConfig()


@dataclass(frozen=True)
class Build:
    """What every layer of a model is made with."""

    config: ModelConfig
    axis: TensorAxis
    seed: int
    """Of the dropout masks."""
    device: torch.device
    dtype: torch.dtype
    recompute: Recompute = Recompute.none
    lora: LoraConfig = NO_LORA
    offload_embedding: bool = False

    @property
    def kind(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype}

    def dropout(self, site: str) -> SampleDropout:
        return SampleDropout(self.config.dropout, seed=self.seed, site=site, axis=self.axis)

    def low_rank(self, *targets: str) -> LowRank | None:
        """The update of those among these outputs that get one; None: none of them does."""
        chosen = frozenset(self.lora.targets).intersection(targets)
        if self.lora.rank is None or not chosen:
            return None
        return LowRank(self.lora.rank, self.lora.scale, chosen)

    def norm(self) -> nn.Module:
        norm = RMSNorm if self.config.norm is Norm.rms else LayerNorm
        return norm(self.config.hidden_size, eps=self.config.norm_eps, **self.kind)


class Embedding(nn.Module):
    """Token embeddings, with learned positions added where the model has them."""

    def __init__(self, build: Build):
        super().__init__()
        config = build.config
        self.axis = build.axis
        self.dropout = build.dropout("embedding")
        self.tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            axis=build.axis,
            device=torch.device("cpu") if build.offload_embedding else build.device,
            dtype=build.dtype,
        )
        self.positions = (
            nn.Embedding(config.max_seq_len, config.hidden_size, **build.kind)
            if config.positions is Positions.learned
            else None
        )

    def forward(self, micro_batch: MicroBatch) -> Tensor:  # -> [seq (/ tp), batch, hidden]
        inputs = micro_batch.tokens[:, :-1].t()  # [seq, batch]
        hidden = self.tokens(inputs)
        if self.positions is not None:
            places = self.axis.own_positions(inputs.shape[0])
            if micro_batch.positions is None:
                hidden = hidden + self.positions.weight[places].unsqueeze(1)
            else:
                hidden = hidden + self.positions(micro_batch.positions.t()[places])
        dropped: Tensor = self.dropout(hidden, micro_batch)
        return dropped


class Layer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); with the weights of another layer, if given.

    Source of the latter: Liu et al. 2024, arXiv:2402.14905, section 2.2.4 (neighbours); Lan et al.
    2019, arXiv:1909.11942 (all layers).
    """

    def __init__(self, build: Build, index: int, same_as: Layer | None = None):
        super().__init__()
        self.attention_norm: nn.Module = same_as.attention_norm if same_as else build.norm()
        self.attention: Attention = same_as.attention if same_as else Attention(build)
        self.attention_dropout = build.dropout(f"layers.{index}.attention")
        self.ffn_norm: nn.Module = same_as.ffn_norm if same_as else build.norm()
        self.ffn: FeedForward = same_as.ffn if same_as else FeedForward(build)
        self.ffn_dropout = build.dropout(f"layers.{index}.ffn")
        self.recompute = build.recompute

    def forward(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        """[seq (/ tp), batch, hidden] -> the same."""
        if self.recompute is Recompute.full and torch.is_grad_enabled():
            # Nothing here draws from torch's random state: it need not be kept.
            output: Tensor = checkpoint(
                self._forward, hidden, micro_batch, use_reentrant=False, preserve_rng_state=False
            )
            return output
        return self._forward(hidden, micro_batch)

    def _forward(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        if self.recompute is Recompute.selective:
            attended = self.attention(hidden, micro_batch, prepare=self.attention_norm)
        else:
            attended = self.attention(self.attention_norm(hidden), micro_batch)
        hidden = hidden + self.attention_dropout(attended, micro_batch)
        if self.recompute is Recompute.selective:
            fed = self.ffn(hidden, prepare=self.ffn_norm)
        else:
            fed = self.ffn(self.ffn_norm(hidden))
        output: Tensor = hidden + self.ffn_dropout(fed, micro_batch)
        return output


class Attention(nn.Module):
    """Causal self-attention over this rank's heads; query, key and value come from one product.

    With fewer key/value heads than ranks, neighbouring ranks hold the same one: each sees the
    gradient of its own query heads alone, and `GPTStage.shared_rows` says what is to be summed.
    """

    def __init__(self, build: Build):
        super().__init__()
        config, tp = build.config, build.axis.tp
        width, kv_parts = config.head_width, min(tp, config.kv_heads)
        self.head_size = width
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            {
                "query": Rows(config.num_heads * width),
                "key": Rows(config.kv_heads * width, kv_parts),
                "value": Rows(config.kv_heads * width, kv_parts),
            },
            axis=build.axis,
            bias=config.bias is not Bias.none,
            low_rank=build.low_rank("query", "key", "value"),
            **build.kind,
        )
        self.output = RowParallelLinear(
            config.num_heads * width,
            config.hidden_size,
            axis=build.axis,
            bias=config.bias is Bias.all,
            low_rank=build.low_rank("attention.output"),
            **build.kind,
        )
        self.rotary = Rotary(config) if config.positions is Positions.rotary else None

    def forward(self, x: Tensor, micro_batch: MicroBatch, prepare: Prepare | None = None) -> Tensor:
        """[seq (/ tp), batch, hidden] -> the same; `prepare` as in `parallel.tensor.linear`."""
        parts = self.qkv(x, prepare).split(self.qkv.sizes, dim=-1)
        # [seq, batch, heads * head] -> [batch, heads, seq, head]
        query, key, value = (
            part.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3) for part in parts
        )
        if self.rotary is not None:
            query = self.rotary(query, micro_batch.positions)
            key = self.rotary(key, micro_batch.positions)
        mask = micro_batch.attention_mask
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        output: Tensor = self.output(mixed.permute(2, 0, 1, 3).flatten(2))
        return output


class FeedForward(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) * up(x)) with gate and up from one product."""

    def __init__(self, build: Build):
        super().__init__()
        config = build.config
        bias = config.bias is Bias.all
        wide = Rows(config.ffn_size)
        gated = config.activation is Activation.swiglu
        self.up = ColumnParallelLinear(
            config.hidden_size,
            {"gate": wide, "up": wide} if gated else {"up": wide},
            axis=build.axis,
            bias=bias,
            low_rank=build.low_rank("gate", "up"),
            **build.kind,
        )
        self.activate = Activate(gated)
        self.down = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            axis=build.axis,
            bias=bias,
            low_rank=build.low_rank("down"),
            **build.kind,
        )

    def forward(self, x: Tensor, prepare: Prepare | None = None) -> Tensor:
        """[seq (/ tp), batch, hidden] -> the same.

        With `prepare` the non-linearity, too, is computed again in the backward pass.
        """
        wide = self.up(x, prepare)  # [seq, batch, ffn / tp], twice as wide with a gate
        output: Tensor = (
            self.down(self.activate(wide)) if prepare is None else self.down(wide, self.activate)
        )
        return output


class Activate(nn.Module):
    """gelu(x), or silu(gate) * up of [gate, up] side by side."""

    def __init__(self, gated: bool):
        super().__init__()
        self.gated = gated

    def forward(self, wide: Tensor) -> Tensor:
        if not self.gated:
            return functional.gelu(wide, approximate="tanh")
        gate, up = wide.chunk(2, dim=-1)
        return functional.silu(gate) * up


class LayerNorm(nn.LayerNorm):
    """torch's, with weights cast to the format of the input."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """torch's, with weights cast to the format of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
