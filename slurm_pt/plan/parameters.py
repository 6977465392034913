"""How many numbers a model has, how many of them are trained, and what training keeps for those."""

from __future__ import annotations

from slurm_pt.config.choices import Activation, Bias, Norm, Positions
from slurm_pt.config.schema import LoraConfig, ModelConfig

COLUMN_PARALLEL = ("query", "key", "value", "gate", "up")
"""Split by output features over tensor ranks; the others by input features."""


def layer_matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The linear layers of one transformer layer: (output features, input features)."""
    hidden, heads, ffn = model.hidden_size, model.num_heads * model.head_width, model.ffn_size
    kv = model.kv_heads * model.head_width
    matrices = {
        "query": (heads, hidden),
        "key": (kv, hidden),
        "value": (kv, hidden),
        "attention.output": (hidden, heads),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    if model.activation is not Activation.swiglu:
        del matrices["gate"]
    return matrices


def model_parameters(model: ModelConfig) -> int:
    """Numbers in the whole model; layers that share weights count once, a tied head not at all.

    >>> gpt2 = ModelConfig(12, 768, 12, vocab_size=50257, max_seq_len=1024)
    >>> model_parameters(gpt2)
    124439808
    """
    matrices = layer_matrices(model)
    biased = {Bias.all: tuple(matrices), Bias.qkv: ("query", "key", "value"), Bias.none: ()}
    norm = model.hidden_size * (1 if model.norm is Norm.rms else 2)
    layer = sum(rows * columns for rows, columns in matrices.values()) + 2 * norm
    layer += sum(matrices[name][0] for name in biased[model.bias])
    vocabulary = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    learned = model.positions is Positions.learned
    positions = model.max_seq_len * model.hidden_size if learned else 0
    return model.num_layers // model.share_layers * layer + vocabulary + positions + norm


def adapter_parameters(
    model: ModelConfig, lora: LoraConfig, *, tp: int = 1, layers: int | None = None
) -> int:
    """Numbers in the adapters of one tensor rank's part of `layers` layers (default: all).

    A column-parallel layer of [out, in] has rank * (in + out / tp) of them, a row-parallel one
    rank * (in / tp + out). Layers that share weights share adapters.

    Source: Hu et al. 2021, arXiv:2106.09685; its table 4 has this GPT-3 with 37.7 M.

    >>> gpt3 = ModelConfig(96, 12288, 96, vocab_size=50257, max_seq_len=2048)
    >>> adapter_parameters(gpt3, LoraConfig(rank=8))
    37748736
    """
    if lora.rank is None:
        return 0
    layer, matrices = 0, layer_matrices(model)
    for target in lora.targets:
        rows, columns = matrices[target]
        parts = min(tp, model.kv_heads) if target in ("key", "value") else tp
        if target in COLUMN_PARALLEL:
            layer += lora.rank * (columns + rows // parts)
        else:
            layer += lora.rank * (columns // tp + rows)
    return (model.num_layers if layers is None else layers) // model.share_layers * layer


def training_bytes(trained: int, *, number_bytes: int = 4) -> int:
    """Of gradients and of AdamW's two moments, on a rank that trains so many numbers.

    >>> training_bytes(100)
    1200
    """
    return 3 * number_bytes * trained
