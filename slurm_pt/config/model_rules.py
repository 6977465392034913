"""What the sizes of a model must fulfil, by themselves and to be split over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from slurm_pt.config.choices import Norm, Positions, RopeScaling
from slurm_pt.config.schema import ModelConfig, RunConfig
from slurm_pt.errors import Problem


def model_rules(config: RunConfig) -> Iterator[Problem]:
    """Every broken rule of the model and its split."""
    model = config.model
    sizes = (model.num_heads, model.num_layers, model.hidden_size, model.kv_heads)
    if min(*sizes, config.parallel.tp) < 1:
        if model.kv_heads < 1:
            fix = "set it to model.num_heads or a divisor of it, or null"
            yield Problem("model.num_kv_heads", model.kv_heads, "must be at least 1", fix)
        return
    yield from _head_rules(model)
    yield from _rotary_rules(model)
    yield from _tensor_rules(config)
    if config.train.seq_len > model.max_seq_len:
        yield Problem(
            "train.seq_len",
            config.train.seq_len,
            f"longer than model.max_seq_len={model.max_seq_len}",
            f"set train.seq_len={model.max_seq_len} or less, or raise model.max_seq_len",
        )


def _head_rules(model: ModelConfig) -> Iterator[Problem]:
    if model.head_size is None and model.hidden_size % model.num_heads:
        yield Problem(
            "model.hidden_size",
            model.hidden_size,
            f"must be divisible by model.num_heads={model.num_heads}",
            f"set model.num_heads to a divisor such as {divisors(model.hidden_size)}, "
            "or set model.head_size",
        )
    if model.num_heads % model.kv_heads:
        yield Problem(
            "model.num_kv_heads",
            model.kv_heads,
            f"must divide model.num_heads={model.num_heads}",
            f"set model.num_kv_heads to one of {divisors(model.num_heads)}",
        )
    if not model.norm_eps > 0:
        fix = f"set model.norm_eps={'1e-6' if model.norm is Norm.rms else '1e-5'}"
        yield Problem("model.norm_eps", model.norm_eps, "must be positive", fix)


def _rotary_rules(model: ModelConfig) -> Iterator[Problem]:
    if model.positions is not Positions.rotary:
        if model.rope_scaling is not RopeScaling.none:
            rule = "has no effect without model.positions=rotary"
            yield Problem("model.rope_scaling", model.rope_scaling.value, rule, "leave it out")
        return
    if model.head_width % 2:
        fix = "set an even model.head_size"
        yield Problem("model.head_size", model.head_width, "rotary positions turn pairs", fix)
    if not model.rope_theta > 1:
        fix = "set model.rope_theta=10000"
        yield Problem("model.rope_theta", model.rope_theta, "must be above 1", fix)
    if model.rope_scaling is not RopeScaling.none and not model.rope_factor >= 1:
        fix = "set how much longer than in the pre-training sequences are"
        yield Problem("model.rope_factor", model.rope_factor, "must be at least 1", fix)
    if model.rope_low_freq_factor >= model.rope_high_freq_factor:
        rule = f"must be below model.rope_high_freq_factor={model.rope_high_freq_factor}"
        fix = "set them as in the model's config.json, 1 and 4 for Llama 3"
        yield Problem("model.rope_low_freq_factor", model.rope_low_freq_factor, rule, fix)


def _tensor_rules(config: RunConfig) -> Iterator[Problem]:
    model, tp = config.model, config.parallel.tp
    split_by_tp = {
        "model.num_heads": model.num_heads,
        "model.ffn_hidden_size": model.ffn_size,
        "model.vocab_size": model.vocab_size,
    }
    for key, size in split_by_tp.items():
        if size % tp:
            fix = f"set parallel.tp to one of {divisors(math.gcd(*split_by_tp.values()))}"
            if key != "model.num_heads":
                fix += f", or {key}={-(-size // tp) * tp}"
            yield Problem("parallel.tp", tp, f"must divide {key}={size}", fix)
    if model.kv_heads % tp and tp % model.kv_heads:
        rule = f"must divide model.num_kv_heads={model.kv_heads}, or be a multiple of it"
        fix = f"set parallel.tp to one of {divisors(model.kv_heads)}"
        yield Problem("parallel.tp", tp, rule, fix)
    if config.parallel.sequence and config.train.seq_len % tp:
        rule = f"parallel.sequence=true splits it over parallel.tp={tp}"
        fix = f"set train.seq_len to a multiple of {tp}, or parallel.sequence=false"
        yield Problem("train.seq_len", config.train.seq_len, rule, fix)


def divisors(number: int) -> str:
    """The smallest ones, for messages."""
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)
