"""Megatron-core: its GPT model, its tensor-parallel layers and its pipeline schedule.

Megatron-core is written for CUDA; `_without_cuda` lists all that is replaced here. Its layers
are those of its own local spec (Transformer Engine needs CUDA), so attention is two batched
products and a softmax, and no kernel is fused. Its optimizer needs its CUDA buffers: torch's
AdamW, which all contestants use, takes the place, with the norm over all ranks.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.contestants import Train, stepwise
from benchmarks.reference import Weights, adamw, clip_gradients, gradients_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.trial import Trial


def build(trial: Trial, weights: Weights) -> Train:
    """Megatron's model and schedule in the trial's layout."""
    _without_cuda()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trial.layout.tp, pipeline_model_parallel_size=trial.layout.pp
    )
    model = _model(trial)
    _load(model, weights, trial)
    optimizer = adamw(trial, model.parameters())
    run_schedule = get_forward_backward_func()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()

    def step(batch: Tensor) -> float | None:
        optimizer.zero_grad()
        parts = run_schedule(
            forward_step_func=_forward_step,
            data_iterator=iter(batch.split(trial.micro_batch_size)),
            model=model,
            num_microbatches=trial.num_microbatches,
            seq_length=trial.model.seq_len,
            micro_batch_size=trial.micro_batch_size,
            forward_only=False,
        )
        _clip(model, trial.grad_clip, tp_rank=tp_rank)
        optimizer.step()
        return sum(float(part) for part in parts) / len(parts) if parts else None

    return stepwise(step)


def _forward_step(tokens: Iterator[Tensor], model: nn.Module) -> Any:
    """What the schedule calls: the loss of each token on the last stage, and how to average it."""
    batch = next(tokens)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    output = model(inputs.contiguous(), positions, None, labels=targets.contiguous())

    def mean(losses: Tensor) -> tuple[Tensor, Tensor]:
        loss = losses.mean()
        return loss, loss.detach().clone()  # the schedule divides the first one in place

    return output, mean


def _model(trial: Trial) -> GPTModel:
    model, gated = trial.model, trial.model.family == "llama"
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        ffn_hidden_size=model.ffn_size,
        normalization="RMSNorm" if gated else "LayerNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=gated,
        activation_func=functional.silu if gated else partial(functional.gelu, approximate="tanh"),
        add_bias_linear=model.has_biases,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=trial.layout.tp,
        pipeline_model_parallel_size=trial.layout.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        # These need CUDA kernels of Apex or Transformer Engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm" if gated else None)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope" if gated else "learned_absolute",
        rotary_base=10000,
    )


NAMES = {
    "embedding.word_embeddings": "embedding.tokens",
    "embedding.position_embeddings": "embedding.positions",
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "pre_mlp_layernorm": "ffn_norm",
    "mlp.linear_fc1": "ffn.up",
    "mlp.linear_fc2": "ffn.down",
    "decoder.final_layernorm": "final_norm",
    "output_layer": "head",
}
"""Megatron's modules and ours. The rows of the fused qkv weight have the same order."""


@torch.no_grad()
def _load(model: GPTModel, weights: Weights, trial: Trial) -> None:
    """Give this rank its layers, and of these its shard."""
    tp, tp_rank = trial.layout.tp, parallel_state.get_tensor_model_parallel_rank()
    offset = parallel_state.get_pipeline_model_parallel_rank() * (
        trial.model.num_layers // trial.layout.pp
    )
    for name, parameter in model.named_parameters():
        whole = weights[_our_name(name, offset)]
        dim = parameter.partition_dim if _is_split(parameter) else None
        local = whole if dim is None else whole.chunk(tp, dim)[tp_rank]
        if "linear_fc1" in name and trial.model.family == "llama":
            # One matrix for both: this rank's rows of the gate, then its rows of up.
            gate = weights[_our_name(name, offset).replace(".up.", ".gate.")]
            local = torch.cat([gate.chunk(tp, 0)[tp_rank], local])
        parameter.copy_(local)


def _our_name(name: str, offset: int) -> str:
    """The weight's name; megatron counts a stage's layers from 0."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("decoder.layers."):
        return f"{NAMES[module]}.{kind}"
    index, _, inner = module.removeprefix("decoder.layers.").partition(".")
    return f"layers.{int(index) + offset}.{NAMES[inner]}.{kind}"


def _is_split(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _clip(model: nn.Module, max_norm: float, *, tp_rank: int) -> None:
    everything = list(model.parameters())
    counted = gradients_of(p for p in everything if _is_split(p) or tp_rank == 0)
    clip_gradients(gradients_of(everything), max_norm, counted=counted, group=dist.group.WORLD)


def _without_cuda() -> None:
    """Replace what asks for a GPU. Nothing here changes what is computed."""
    # The device of every buffer, and of what a stage receives.
    torch.cuda.current_device = lambda: torch.device("cpu")
    # After a batch of messages: on the CPU a request is done when it has been waited for.
    torch.cuda.synchronize = lambda *_: None
    # Three factory calls name "cuda": the mask of attention, and a count in either schedule.
    fused_softmax.get_default_causal_mask = _causal_mask
    _replace_zeros()
    # Its random states live on the GPU. Dropout is 0 and the weights are loaded: none is needed.
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()


def _causal_mask(seq: int) -> Tensor:
    return torch.triu(torch.ones(seq, seq), diagonal=1).bool()


def _replace_zeros() -> None:
    zeros = torch.zeros

    def on_cpu(*size: Any, **options: Any) -> Tensor:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return zeros(*size, **options)

    torch.zeros = on_cpu
