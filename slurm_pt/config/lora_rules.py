"""What low-rank adapters must fulfil."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_pt.config.choices import Activation
from slurm_pt.config.schema import RunConfig
from slurm_pt.errors import Problem, nearest

LORA_TARGETS = ("query", "key", "value", "attention.output", "gate", "up", "down")
"""The linear layers of a transformer layer."""


def lora_rules(config: RunConfig) -> Iterator[Problem]:
    """Every broken rule of the adapters; they are looked at where lora.rank says that there are."""
    lora, key = config.lora, "lora.targets"
    if lora.rank is None:
        return
    if lora.rank < 1:
        fix = "set lora.rank=8, or null for no adapters"
        yield Problem("lora.rank", lora.rank, "must be at least 1", fix)
    if not lora.alpha > 0:
        yield Problem("lora.alpha", lora.alpha, "must be positive", "set lora.alpha=16")
    gated = config.model.activation is Activation.swiglu
    known = [target for target in LORA_TARGETS if gated or target != "gate"]
    if not lora.targets:
        fix = f"name some of {', '.join(known)}, or set lora.rank=null"
        yield Problem(key, "[]", "adapters without a place", fix)
    for target in lora.targets:
        if target == "gate" and not gated:
            rule = f"model.activation={config.model.activation.value} has no gate"
            yield Problem(key, target, rule, "leave gate out, or set model.activation=swiglu")
        elif target not in known:
            rule = f"there is no such layer{nearest(target, known)}"
            yield Problem(key, target, rule, f"use some of {', '.join(known)}")
        elif lora.targets.count(target) > 1:
            yield Problem(key, target, "named twice", "name it once")
            return
