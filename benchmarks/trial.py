"""One training to be timed: who trains which model in which layout. Plain values, no torch."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from typing import Any


@dataclass(frozen=True)
class Model:
    """A causal transformer that every contestant can build.

    `gpt2`: learned positions, LayerNorm, GELU (tanh form), biases. `llama`: rotary positions,
    RMSNorm, SwiGLU, no biases. Both: pre-norm, as many key as query heads, an output head of
    its own (tied embeddings are left out: torch's pipelining and DTensor have no support).
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    seq_len: int

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def has_biases(self) -> bool:
        return self.family == "gpt2"


# About 17 million parameters each: small enough for two cores, and large enough that matrix
# products, not Python, take most of a step.
MODELS = {
    "gpt2": Model("gpt2", 384, 6, 6, 1536, 8192, 128),
    "llama": Model("llama", 384, 6, 6, 1024, 8192, 128),
    # For tests of the harness alone: says nothing about speed.
    "tiny": Model("gpt2", 32, 2, 4, 64, 64, 16),
    "tiny-llama": Model("llama", 32, 2, 4, 64, 64, 16),
}


@dataclass(frozen=True)
class Layout:
    """The degrees of tensor, pipeline and data parallelism.

    >>> Layout.parse("tp2pp2"), Layout.parse("one")
    (Layout(tp=2, pp=2, dp=1), Layout(tp=1, pp=1, dp=1))
    >>> str(Layout.parse("dp2"))
    'dp2'
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @classmethod
    def parse(cls, text: str) -> Layout:
        """A layout from its name: tp, pp and dp with their degrees, or `one`."""
        if text == "one":
            return cls()
        if not re.fullmatch(r"((tp|pp|dp)[1-9]\d*)+", text):
            raise ValueError(f"layout {text!r}: write it like tp2, pp2, tp2pp2, dp2, or one")
        return cls(**{axis: int(n) for axis, n in re.findall(r"(tp|pp|dp)(\d+)", text)})

    def __str__(self) -> str:
        degrees = asdict(self).items()
        return "".join(f"{axis}{degree}" for axis, degree in degrees if degree > 1) or "one"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def ideal_share(self, micro_batches: int) -> float:
        """The step time as a share of one process's if nothing but the pipeline's bubble were lost.

        With m micro-batches and p equal stages that is (m + p - 1) / m over the number of ranks.

        >>> Layout(pp=2).ideal_share(8), Layout(tp=2).ideal_share(1)
        (0.5625, 0.5)
        """
        bubble = (micro_batches + self.pp - 1) / micro_batches
        return bubble / self.world_size


@dataclass(frozen=True)
class Trial:
    """One contestant's training, from the same weights and on the same batches as all others."""

    contestant: str
    layout: Layout
    model: Model
    global_batch_size: int
    micro_batch_size: int
    """Sequences of one forward pass of one rank."""
    warmup: int
    """Steps before those that are timed."""
    steps: int
    seed: int = 0
    lr: float = 3e-4
    """Constant."""
    weight_decay: float = 0.1
    """Of matrices; vectors do not decay."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.layout.dp)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Trial:
        """The trial that was written."""
        parts = {"layout": Layout(**raw["layout"]), "model": Model(**raw["model"])}
        return cls(**{**raw, **parts})


def layers_evenly(model: Model, stages: int) -> list[range]:
    """As many layers in each stage, the first ones taking what is left over.

    >>> layers_evenly(MODELS["gpt2"], 4)
    [range(0, 2), range(2, 3), range(3, 5), range(5, 6)]
    """
    bounds = [-(-model.num_layers * stage // stages) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def layers_by_cost(model: Model, stages: int) -> list[range]:
    """The split whose most expensive stage is cheapest: the head costs matrix products too.

    >>> layers_by_cost(MODELS["gpt2"], 2)
    [range(0, 4), range(4, 6)]
    """
    hidden = model.hidden_size
    products = 3 if model.family == "llama" else 2
    # Multiplications a token: parameters of the matrices, and scores and values of attention.
    layer = 4 * hidden**2 + products * hidden * model.ffn_size + 2 * model.seq_len * hidden
    head = hidden * model.vocab_size

    def most_expensive(cuts: tuple[int, ...]) -> int:
        bounds = [0, *cuts, model.num_layers]
        sizes = [end - start for start, end in pairwise(bounds)]
        return max(*(size * layer for size in sizes[:-1]), sizes[-1] * layer + head)

    cuts = min(combinations(range(1, model.num_layers), stages - 1), key=most_expensive)
    bounds = [0, *cuts, model.num_layers]
    return [range(start, end) for start, end in pairwise(bounds)]
