"""The values that are one of a few names."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """Number format of weights and activations."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Positions(Enum):
    """How a token's place in the sequence is made known."""

    learned = "learned"
    """A table of vectors that are added to the token's (GPT-2)."""
    rotary = "rotary"
    """Queries and keys are turned by angles that grow with the place (Llama, Qwen)."""


class RopeScaling(Enum):
    """How rotary frequencies are stretched for sequences longer than those of the pre-training."""

    none = "none"
    linear = "linear"
    """All by model.rope_factor."""
    llama3 = "llama3"
    """The low ones by model.rope_factor, the high ones not, those between in part."""


class Norm(Enum):
    """What normalises the residual stream."""

    layer = "layer"
    rms = "rms"


class Activation(Enum):
    """The non-linearity of the feed-forward block."""

    gelu = "gelu"
    """down(gelu(up(x))), with the tanh form of GELU."""
    swiglu = "swiglu"
    """down(silu(gate(x)) * up(x))."""


class Bias(Enum):
    """Which linear layers have a bias."""

    all = "all"
    qkv = "qkv"
    """Query, key and value alone (Qwen 2)."""
    none = "none"


class Recompute(Enum):
    """What a layer does not keep for its backward pass."""

    none = "none"
    selective = "selective"
    """Norms and the non-linearity: cheap to compute again."""
    full = "full"
    """All but its input: the layer's forward pass runs twice."""


class Engine(Enum):
    """What runs forward, backward and update of a rank."""

    native = "native"
    deepspeed = "deepspeed"
    """DeepSpeed's ZeRO, over our model and tensor-parallel layers."""


class Schedule(Enum):
    """In which order a pipeline runs its micro-batches."""

    one_f_one_b = "one_f_one_b"
    gpipe = "gpipe"
    interleaved = "interleaved"
    zero_bubble = "zero_bubble"


class GradientCompression(Enum):
    """What is sent of the gradients when they are summed over the replicas."""

    none = "none"
    fp16 = "fp16"
    """float16 numbers."""
    bf16 = "bf16"
    """bfloat16 numbers."""
    powersgd = "powersgd"
    """Matrices as two factors of low rank, with error feedback."""


class Outer(Enum):
    """How replicas that made updates on their own agree on new weights."""

    average = "average"
    """The mean of their weights (local SGD)."""
    nesterov = "nesterov"
    """A step of Nesterov's method towards that mean (DiLoCo)."""
