"""What the ranks of the comparison with Hugging Face's models run."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slurm_pt.config.choices import DType
from slurm_pt.config.schema import ModelConfig
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.gradient_buckets import GradientBuckets
from slurm_pt.parallel.gradient_sums import sum_gradients, sum_tied_gradient
from slurm_pt.parallel.groups import ProcessGroups, create_groups
from slurm_pt.parallel.pipeline import Message, run_pipeline
from slurm_pt.plan.layout import ParallelLayout, split_layers
from slurm_pt.training.hugging_face import TheirTensor, from_their_config, their_tensors
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.model import GPTStage, StageSpan

VOCAB, SEQ_LEN, BATCH = 40, 12, 4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 tied": ("gpt2", {"tie_word_embeddings": True}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "llama with grouped queries": ("llama", {"num_key_value_heads": 2}),
    "llama with stretched positions": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "qwen tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
}


def build_theirs(family: str, dtype: torch.dtype) -> nn.Module:
    """Their model with random weights, the same on every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        kind, settings = FAMILIES[family]
        if kind == "gpt2":
            config: Any = transformers.GPT2Config(
                vocab_size=VOCAB,
                n_positions=SEQ_LEN,
                n_embd=32,
                n_layer=4,
                n_head=4,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                **settings,
            )
        else:
            classes = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
            config = classes[kind](
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=32,
                **settings,
            )
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        with torch.no_grad():
            for parameter in model.parameters():  # so that biases and norms count too
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    made: nn.Module = model.to(dtype).train()
    return made


def ours_in(theirs: dict[str, Tensor], entry: TheirTensor) -> Tensor:
    """Our whole tensor, out of theirs."""
    tensor = theirs[entry.name]
    tensor = tensor.t() if entry.transposed else tensor
    return tensor.chunk(entry.count, dim=0)[entry.index]


def compare(family: str, layout: tuple[int, int, int], sequence: bool) -> dict[str, float]:
    """Largest error of each kind, as a share of the norm of the whole tensor."""
    theirs = build_theirs(family, torch.float32)
    their_config = theirs.config.to_dict()
    config = from_their_config(their_config)
    groups = create_groups(
        ParallelLayout(*layout),
        rank=dist.get_rank(),
        device=torch.device("cpu"),
        timeout_s=120.0,
        kv_heads=config.kv_heads,
    )
    stage = _build_ours(config, groups, sequence=sequence)
    weights = {name: p.detach() for name, p in theirs.named_parameters()}
    _load(stage, weights, config)
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ_LEN + 1))
    micro_batches = [MicroBatch(tokens[i : i + 2], (i, i + 1), 0) for i in (0, 2)]
    logits: list[Tensor] = []
    loss = _run_ours(stage, micro_batches, groups, logits)

    expected_logits = theirs(tokens[:, :-1]).logits
    expected = nn.functional.cross_entropy(expected_logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    worst = {"gradients": _gradient_errors(stage, gradients, config)}
    if groups.last_stage:
        ours = torch.cat(logits, dim=1).transpose(0, 1)  # [batch, seq, vocab / tp]
        part = expected_logits.chunk(groups.layout.tp, -1)[groups.place.tp_rank]
        worst["logits"] = ((ours - part).norm() / expected_logits.norm()).item()
        worst["loss"] = abs(loss.item() / expected.item() - 1.0)
    groups.close()
    return worst


def _build_ours(config: ModelConfig, groups: ProcessGroups, *, sequence: bool) -> GPTStage:
    layers = split_layers(config.num_layers, groups.layout.pp)[groups.place.pp_rank]
    return GPTStage(
        config,
        StageSpan(layers, first=groups.first_stage, last=groups.last_stage),
        axis=TensorAxis.of(groups, sequence=sequence),
        device=groups.device,
        dtype=DType.float32,
        seed=0,
    )


def _run_ours(
    stage: GPTStage,
    micro_batches: list[MicroBatch],
    groups: ProcessGroups,
    logits: list[Tensor],
) -> Tensor:
    """The loss; gradients are left in the buckets, summed over all that must be."""
    buckets = GradientBuckets(stage.parameters(), group=groups.dp)

    def forward(entered: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        hidden = stage.hidden(entered, micro_batch)
        if not groups.last_stage:
            return hidden
        logits.append(stage.logits(hidden.detach()).detach())
        return stage.losses(hidden, micro_batch).mean()

    shape = stage.message_shape(micro_batch_size=2, seq_len=SEQ_LEN)
    message = Message(shape=shape, dtype=torch.float32)
    loss = run_pipeline([forward], micro_batches, message=message, groups=groups)
    sum_gradients([p.grad for p in stage.partial_gradients() if p.grad is not None], groups.tp)
    sum_gradients(stage.shared_gradients(), groups.kv)
    buckets.finish_sum()
    tied = stage.tied_parameter()
    sum_tied_gradient(None if tied is None else tied.grad, groups)
    return loss


def _local(stage: GPTStage, theirs: dict[str, Tensor], config: ModelConfig) -> Any:
    """(piece, parameter, this rank's part of their tensor, their tensor) for all it holds."""
    names = their_tensors(config)
    parameters = dict(stage.named_parameters())
    for piece in stage.pieces():
        whole = ours_in(theirs, names[piece.stored])
        local = piece.of(parameters[piece.parameter])
        begin = piece.shard.offsets(local.shape)
        part = whole[tuple(slice(b, b + n) for b, n in zip(begin, local.shape, strict=True))]
        yield piece, parameters[piece.parameter], part, theirs[names[piece.stored].name]


def _load(stage: GPTStage, theirs: dict[str, Tensor], config: ModelConfig) -> None:
    with torch.no_grad():
        for piece, parameter, part, _ in _local(stage, theirs, config):
            piece.of(parameter).copy_(part)


def _gradient_errors(stage: GPTStage, theirs: dict[str, Tensor], config: ModelConfig) -> float:
    return max(
        ((piece.of(parameter.grad) - part).norm() / whole.norm()).item()
        for piece, parameter, part, whole in _local(stage, theirs, config)
    )


def compare_all(layouts: list[tuple[tuple[int, int, int], bool]]) -> dict[Any, dict[str, float]]:
    """Every family in each of the layouts."""
    return {
        (family, layout, sequence): compare(family, layout, sequence)
        for family in FAMILIES
        for layout, sequence in layouts
    }
