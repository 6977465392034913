"""The model of a trial in plain torch, its initial weights, its batches and its optimizer.

What peers that split a model of the user's are given, and what all others are compared with.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.trial import Model, Trial

Weights = dict[str, Tensor]
"""Whole tensors by the names of `Decoder`'s parameters. Rows of a fused qkv weight are ordered
head by head: q, k, v of head 0, then of head 1."""


class Decoder(nn.Module):
    """Consecutive layers of the model, with the embeddings if first, with the head if last."""

    def __init__(
        self, model: Model, *, layers: range | None = None, first: bool = True, last: bool = True
    ):
        super().__init__()
        layers = range(model.num_layers) if layers is None else layers
        self.embedding = Embedding(model) if first else None
        self.layers = nn.ModuleDict({str(index): Layer(model) for index in layers})
        self.final_norm = norm_of(model) if last else None
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq] or [batch, seq, hidden]
        hidden = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.final_norm is None or self.head is None:
            return hidden
        logits: Tensor = self.head(self.final_norm(hidden))  # [batch, seq, vocab]
        return logits


class Embedding(nn.Module):
    """Token embeddings, plus learned positions in the GPT-2 family."""

    def __init__(self, model: Model):
        super().__init__()
        self.tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        learned = model.family == "gpt2"
        self.positions = nn.Embedding(model.seq_len, model.hidden_size) if learned else None

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.tokens(ids)
        return hidden if self.positions is None else hidden + self.positions.weight


class Layer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, model: Model):
        super().__init__()
        self.attention_norm = norm_of(model)
        self.attention = Attention(model)
        self.ffn_norm = norm_of(model)
        self.ffn = FeedForward(model)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        output: Tensor = hidden + self.ffn(self.ffn_norm(hidden))
        return output


class Attention(nn.Module):
    """Causal self-attention over as many heads as the (local) fused weight has."""

    def __init__(self, model: Model):
        super().__init__()
        self.head_size, bias = model.head_size, model.has_biases
        self.qkv = nn.Linear(model.hidden_size, 3 * model.hidden_size, bias=bias)
        self.output = nn.Linear(model.hidden_size, model.hidden_size, bias=bias)
        self.rotary = model.family == "llama"
        if self.rotary:
            for name, table in zip(("cos", "sin"), rotary_tables(model), strict=True):
                self.register_buffer(name, table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = fused.transpose(1, 2).unbind(3)  # [batch, heads, seq, head]
        if self.rotary:
            query, key = self._rotate(query), self._rotate(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        turned = torch.cat((-right, left), -1)
        return x * self.get_buffer("cos") + turned * self.get_buffer("sin")


class FeedForward(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) * up(x)) in the Llama family."""

    def __init__(self, model: Model):
        super().__init__()
        hidden, wide, bias = model.hidden_size, model.ffn_size, model.has_biases
        gated = model.family == "llama"
        self.gate = nn.Linear(hidden, wide, bias=False) if gated else None
        self.up = nn.Linear(hidden, wide, bias=bias)
        self.down = nn.Linear(wide, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            wide = functional.gelu(self.up(x), approximate="tanh")
        else:
            wide = functional.silu(self.gate(x)) * self.up(x)
        output: Tensor = self.down(wide)
        return output


def norm_of(model: Model) -> nn.Module:
    """The family's norm over the hidden size."""
    norm = nn.LayerNorm if model.family == "gpt2" else nn.RMSNorm
    return norm(model.hidden_size, eps=1e-5)


def rotary_tables(model: Model) -> tuple[Tensor, Tensor]:
    """Cosine and sine by position, [seq, head], for halves that rotate against each other.

    Source: Su et al. 2021, arXiv:2104.09864, with base 10000.
    """
    half = torch.arange(0, model.head_size, 2, dtype=torch.float32) / model.head_size
    angles = torch.outer(torch.arange(model.seq_len, dtype=torch.float32), 10000.0**-half)
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


def initial_weights(model: Model, seed: int) -> Weights:
    """Every parameter of the model.

    Biases and norms are drawn too, not 0 and 1: a contestant that mixes two of them up must not
    agree by chance.
    """
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(model).named_parameters()}
    weights = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        drawn = torch.empty(shape).normal_(0.0, 0.02, generator=generator)
        weights[name] = drawn + 1.0 if name.endswith("norm.weight") else drawn
    return weights


def load(module: nn.Module, weights: Weights) -> None:
    """Give a `Decoder` its part of the weights."""
    module.load_state_dict({name: weights[name] for name in module.state_dict()})


def batch_of(trial: Trial, step: int) -> Tensor:
    """The tokens of a step, [global batch, seq + 1]: inputs and, shifted by one, targets.

    Low ids are much more frequent than high ones, so there is something to learn from batches
    that never repeat, and the loss moves from the first step on.
    """
    generator = torch.Generator().manual_seed(trial.seed * 1_000_003 + step)
    shape = (trial.global_batch_size, trial.model.seq_len + 1)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (uniform**4 * trial.model.vocab_size).long()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log softmax(logits)[target] over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(trial: Trial, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of all contestants. `fused`, as in our runtime.

    DTensors and plain tensors go into groups of their own: one fused operation takes only one
    kind.
    """
    groups: dict[tuple[bool, type], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.ndim >= 2, type(parameter.data)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": trial.weight_decay if decays else 0.0}
            for (decays, _), members in groups.items()
        ],
        lr=trial.lr,
        betas=(trial.beta1, trial.beta2),
        eps=trial.eps,
        fused=True,
    )


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def clip_gradients(
    gradients: Sequence[Tensor],
    max_norm: float,
    *,
    counted: Sequence[Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Scale local gradients so that the norm of the whole model's gradient is at most `max_norm`.

    `counted` are those this rank adds to the sum over the group (None: all of them), so that
    what several ranks hold counts once. No group: this rank's norm is the whole one.
    """
    norms = torch._foreach_norm(list(gradients if counted is None else counted))
    square = torch.stack(list(norms)).double().square().sum() if norms else torch.zeros(1).double()
    if group is not None:
        dist.all_reduce(square, group=group)
    factor = max_norm / (float(square) ** 0.5 + 1e-6)
    if factor < 1.0:
        torch._foreach_mul_(list(gradients), factor)
