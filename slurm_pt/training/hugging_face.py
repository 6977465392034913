"""Hugging Face's names and configurations of the models that ours equal.

One tensor of ours is a tensor of theirs, or one of several that they keep in one, turned over where
they store [in, out].

Source: Hugging Face transformers, `GPT2LMHeadModel`, `LlamaForCausalLM`, `Qwen2ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from slurm_pt.config.choices import Activation, Bias, Norm, Positions, RopeScaling
from slurm_pt.config.schema import ModelConfig
from slurm_pt.errors import ConfigError, Problem


@dataclass(frozen=True)
class TheirTensor:
    """Where one of our tensors lies in their files."""

    name: str
    transposed: bool = False
    """Stored as [in, out], where ours is [out, in]."""
    index: int = 0
    count: int = 1
    """Ours is number `index` of `count` equal parts along the output features."""


def their_tensors(config: ModelConfig) -> dict[str, TheirTensor]:
    """Our stored name to their tensor, for every tensor of the model."""
    names = _gpt2_names if config.positions is Positions.learned else _llama_names
    return dict(names(config))


def _gpt2_names(config: ModelConfig) -> Iterator[tuple[str, TheirTensor]]:
    kinds = ("weight", "bias")
    yield "embedding.tokens.weight", TheirTensor("transformer.wte.weight")
    yield "embedding.positions.weight", TheirTensor("transformer.wpe.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        for kind in kinds:
            matrix = kind == "weight"
            for index, part in enumerate(("query", "key", "value")):
                fused = TheirTensor(f"{theirs}.attn.c_attn.{kind}", matrix, index, 3)
                yield f"{ours}.attention.{part}.{kind}", fused
            for own, other in (
                ("attention.output", "attn.c_proj"),
                ("ffn.up", "mlp.c_fc"),
                ("ffn.down", "mlp.c_proj"),
            ):
                yield f"{ours}.{own}.{kind}", TheirTensor(f"{theirs}.{other}.{kind}", matrix)
            yield f"{ours}.attention_norm.{kind}", TheirTensor(f"{theirs}.ln_1.{kind}")
            yield f"{ours}.ffn_norm.{kind}", TheirTensor(f"{theirs}.ln_2.{kind}")
    for kind in kinds:
        yield f"final_norm.{kind}", TheirTensor(f"transformer.ln_f.{kind}")
    if not config.tie_embeddings:
        yield "head.weight", TheirTensor("lm_head.weight")


def _llama_names(config: ModelConfig) -> Iterator[tuple[str, TheirTensor]]:
    yield "embedding.tokens.weight", TheirTensor("model.embed_tokens.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for own, other, has_bias in (
            ("attention.query", "self_attn.q_proj", config.bias is not Bias.none),
            ("attention.key", "self_attn.k_proj", config.bias is not Bias.none),
            ("attention.value", "self_attn.v_proj", config.bias is not Bias.none),
            ("attention.output", "self_attn.o_proj", config.bias is Bias.all),
            ("ffn.gate", "mlp.gate_proj", config.bias is Bias.all),
            ("ffn.up", "mlp.up_proj", config.bias is Bias.all),
            ("ffn.down", "mlp.down_proj", config.bias is Bias.all),
        ):
            yield f"{ours}.{own}.weight", TheirTensor(f"{theirs}.{other}.weight")
            if has_bias:
                yield f"{ours}.{own}.bias", TheirTensor(f"{theirs}.{other}.bias")
        yield f"{ours}.attention_norm.weight", TheirTensor(f"{theirs}.input_layernorm.weight")
        after = TheirTensor(f"{theirs}.post_attention_layernorm.weight")
        yield f"{ours}.ffn_norm.weight", after
    yield "final_norm.weight", TheirTensor("model.norm.weight")
    if not config.tie_embeddings:
        yield "head.weight", TheirTensor("lm_head.weight")


# ------------------------------------------------------------------------------- configurations


def from_their_config(theirs: dict[str, Any]) -> ModelConfig:
    """Our configuration of a model, from its `config.json`. Raises ConfigError for other models."""
    kind = theirs.get("model_type")
    readers = {"gpt2": _from_gpt2, "llama": _from_llama, "qwen2": _from_llama}
    if kind not in readers:
        rule = f"none of {', '.join(sorted(readers))}"
        raise ConfigError([Problem("model_type", kind, rule, "convert one of these")])
    return readers[kind](theirs)


def _from_gpt2(theirs: dict[str, Any]) -> ModelConfig:
    _only(theirs, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    dropouts = {theirs.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop")}
    if len(dropouts) > 1:
        rule = "resid_pdrop and embd_pdrop differ, and here they are one"
        raise ConfigError([Problem("resid_pdrop", dropouts, rule, "make them equal")])
    return ModelConfig(
        num_layers=theirs["n_layer"],
        hidden_size=theirs["n_embd"],
        num_heads=theirs["n_head"],
        vocab_size=theirs["vocab_size"],
        max_seq_len=theirs["n_positions"],
        ffn_hidden_size=theirs.get("n_inner"),
        norm_eps=theirs.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=theirs.get("tie_word_embeddings", True),
        dropout=dropouts.pop(),
        init_std=theirs.get("initializer_range", 0.02),
    )


def _from_llama(theirs: dict[str, Any]) -> ModelConfig:
    _only(theirs, "hidden_act", "silu")
    bias = Bias.qkv if theirs["model_type"] == "qwen2" else Bias.none
    if theirs.get("attention_bias") or theirs.get("mlp_bias"):
        rule = "Llama with biases is not known here"
        raise ConfigError([Problem("attention_bias", True, rule, "convert a model without them")])
    if theirs.get("use_sliding_window"):
        rule = "sliding-window attention is not known here"
        raise ConfigError([Problem("use_sliding_window", True, rule, "set it to false")])
    return ModelConfig(
        num_layers=theirs["num_hidden_layers"],
        hidden_size=theirs["hidden_size"],
        num_heads=theirs["num_attention_heads"],
        num_kv_heads=theirs.get("num_key_value_heads"),
        head_size=theirs.get("head_dim"),
        vocab_size=theirs["vocab_size"],
        max_seq_len=theirs["max_position_embeddings"],
        ffn_hidden_size=theirs["intermediate_size"],
        positions=Positions.rotary,
        norm=Norm.rms,
        norm_eps=theirs["rms_norm_eps"],
        activation=Activation.swiglu,
        bias=bias,
        tie_embeddings=theirs.get("tie_word_embeddings", False),
        init_std=theirs.get("initializer_range", 0.02),
        **_rope(theirs),
    )


def _rope(theirs: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: under `rope_parameters` since transformers 5, apart before."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    found: dict[str, Any] = {"rope_theta": rope.get("rope_theta", theirs.get("rope_theta", 1e4))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return found
    if kind not in ("linear", "llama3"):
        rule = "of the rotary scalings, linear and llama3 are known here"
        raise ConfigError([Problem("rope_scaling", kind, rule, "convert a model with these")])
    found |= {"rope_scaling": RopeScaling(kind), "rope_factor": rope["factor"]}
    if kind == "llama3":
        found |= {
            "rope_low_freq_factor": rope["low_freq_factor"],
            "rope_high_freq_factor": rope["high_freq_factor"],
            "rope_original_seq_len": rope["original_max_position_embeddings"],
        }
    return found


def _only(theirs: dict[str, Any], key: str, *known: str) -> None:
    value = theirs.get(key, known[0])
    if value not in known:
        rule = f"here only {' and '.join(known)} is known"
        raise ConfigError([Problem(key, value, rule, "convert a model that has it")])


def to_their_config(config: ModelConfig, *, vocab_size: int | None = None) -> dict[str, Any]:
    """What `config.json` says of a model of ours; the opposite of `from_their_config`.

    `vocab_size` is the number of real ids, where rows were added to fill the vocabulary up.

    Raises ConfigError for a mixture that no model of theirs has.
    """
    vocab = {"vocab_size": vocab_size or config.vocab_size}
    shared = {"tie_word_embeddings": config.tie_embeddings, "initializer_range": config.init_std}
    made = vocab | shared | (_to_gpt2(config) if _is_gpt2(config) else _to_llama(config))
    alike = replace(config, vocab_size=made["vocab_size"], share_layers=1)  # written out
    if from_their_config(made) != alike:
        what = f"{config.positions.value}, {config.norm.value}, {config.activation.value}"
        rule = "no Hugging Face model known here has these together with these biases"
        fix = "export models of the form of GPT-2, Llama or Qwen 2"
        raise ConfigError([Problem("model", what, rule, fix)])
    return made


def _is_gpt2(config: ModelConfig) -> bool:
    return config.positions is Positions.learned


def _to_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_positions": config.max_seq_len,
        "n_inner": config.ffn_hidden_size,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": None,  # theirs are of the published vocabulary
        "eos_token_id": None,
    }


def _to_llama(config: ModelConfig) -> dict[str, Any]:
    qwen = config.bias is Bias.qkv
    scaling: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not RopeScaling.none:
        scaling |= {"rope_type": config.rope_scaling.value, "factor": config.rope_factor}
    if config.rope_scaling is RopeScaling.llama3:
        scaling |= {
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_seq_len,
        }
    made = {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": "qwen2" if qwen else "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "intermediate_size": config.ffn_hidden_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_parameters": scaling,
    }
    if config.head_size is not None:
        made["head_dim"] = config.head_size
    return made
