"""What ZeRO and the choice of an engine need."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from slurm_pt.config.choices import DType, Engine
from slurm_pt.config.schema import RunConfig
from slurm_pt.errors import Problem

LAST_STAGE = 3
"""Of ZeRO."""


def engine_rules(config: RunConfig) -> Iterator[Problem]:
    """Every broken rule of the engine."""
    zero = config.parallel.zero
    if not 0 <= zero <= LAST_STAGE:
        yield Problem("parallel.zero", zero, "ZeRO has the stages 1 to 3", "set it to 0, 1, 2 or 3")
    elif config.train.engine is Engine.deepspeed:
        yield from _deepspeed_rules(config)
    else:
        yield from _native_rules(config)


def _native_rules(config: RunConfig) -> Iterator[Problem]:
    zero = config.parallel.zero
    if zero > 1:
        rule = "the native engine shards the optimizer's state alone"
        yield Problem("parallel.zero", zero, rule, "set train.engine=deepspeed, or parallel.zero=1")
    if config.train.offload_parameters:
        key, rule = "train.offload_parameters", "the native engine keeps weights on the device"
        yield Problem(key, True, rule, f"set train.engine=deepspeed, or {key}=false")
    if config.train.offload_embedding and config.model.tie_embeddings:
        key, rule = "train.offload_embedding", "a tied table is also the head, a product on the GPU"
        yield Problem(key, True, rule, f"set model.tie_embeddings=false, or {key}=false")


def _deepspeed_rules(config: RunConfig) -> Iterator[Problem]:
    parallel, train = config.parallel, config.train
    if config.slurm.python is None and importlib.util.find_spec("deepspeed") is None:
        rule = "DeepSpeed is not installed here"
        fix = "pip install 'slurm_pt[deepspeed]', or set train.engine=native"
        yield Problem("train.engine", "deepspeed", rule, fix)
    if parallel.zero == 0:
        rule = "without ZeRO, DeepSpeed does what the native engine does"
        fix = "set parallel.zero=1, 2 or 3, or train.engine=native"
        yield Problem("parallel.zero", 0, rule, fix)
    if parallel.pp > 1:
        rule = (
            "train.engine=deepspeed splits over tp and dp alone: ZeRO 2 and 3 reduce gradients "
            "and gather weights in each micro-batch, which undoes a pipeline's gain"
        )
        fix = "set parallel.pp=1, or train.engine=native, which runs pipelines"
        yield Problem("parallel.pp", parallel.pp, rule, fix)
    if train.dtype in (DType.float16, DType.float64):
        rule = (
            "DeepSpeed refuses float16 on a CPU"
            if train.dtype is DType.float16
            else ("DeepSpeed's optimizer keeps float32 weights")
        )
        fix = "set train.dtype=bfloat16 or float32, or train.engine=native"
        yield Problem("train.dtype", train.dtype.value, rule, fix)
    if config.model.kv_heads < parallel.tp:
        rule = (
            f"fewer than parallel.tp={parallel.tp}: tensor ranks would share heads, which "
            "DeepSpeed's gradient norm counts twice"
        )
        fix = f"set parallel.tp={config.model.kv_heads} or a divisor, or train.engine=native"
        yield Problem("model.num_kv_heads", config.model.kv_heads, rule, fix)
    for key, value, plain in (
        ("parallel.gradient_compression", parallel.gradient_compression.value, "none"),
        ("train.local_steps", train.local_steps, 1),
        ("train.offload_embedding", train.offload_embedding, False),
        ("lora.rank", config.lora.rank, None),
        ("model.share_layers", config.model.share_layers, 1),
    ):
        if value != plain:
            shown = "null" if plain is None else str(plain).lower()
            fix = f"set {key}={shown}, or train.engine=native"
            yield Problem(key, value, "only the native engine has it", fix)
    if train.offload_parameters and parallel.zero != LAST_STAGE:
        rule = f"needs weights that are split over dp, but parallel.zero={parallel.zero}"
        fix = "set parallel.zero=3, or train.offload_parameters=false"
        yield Problem("train.offload_parameters", True, rule, fix)
