"""What the ranks of test_split_model run: the example's own decoder, and two of Hugging Face."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from slurm_pt.checkpoint.user_state import flatten, load_user_state
from slurm_pt.config.choices import Schedule
from slurm_pt.config.schema import ParallelConfig
from slurm_pt.parallel.groups import create_groups
from slurm_pt.parallel.split_model import SplitModel, split
from slurm_pt.parallel.split_plan import SplitPlan
from slurm_pt.parallel.tensor import Rows
from slurm_pt.parallel.vocabulary import cross_entropy
from slurm_pt.plan.layout import ParallelLayout
from tests.checkpoint.toy import checkpointer
from tests.ranks import REPOSITORY

BATCH, MICRO, STEPS, CLIP = 8, 2, 5, 0.5
VARIANTS = {
    "plain": ParallelConfig(),
    "tied": ParallelConfig(),
    "tied, sequence": ParallelConfig(sequence=True),
    "grouped": ParallelConfig(),
    "from meta": ParallelConfig(),
    "sequence": ParallelConfig(sequence=True),
    "sequence first": ParallelConfig(sequence=True),
    "zero_bubble": ParallelConfig(schedule=Schedule.zero_bubble),
    "interleaved": ParallelConfig(schedule=Schedule.interleaved, virtual_stages=2),
    "other micro-batches": ParallelConfig(),
    "uneven": ParallelConfig(stage_layers=[2, 5]),
}
Curve = tuple[list[float], list[float]]
"""Losses and gradient norms."""


@cache
def example() -> ModuleType:
    """docs/examples/own_model.py."""
    path = REPOSITORY / "docs" / "examples" / "own_model.py"
    spec = importlib.util.spec_from_file_location("own_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class GroupedAttention(nn.Module):
    """The example's attention with two key/value heads instead of four, and plain arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        width = example().WIDTH
        self.head = width // 4
        self.qkv, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x)
        half = fused.shape[-1] // 2  # on two ranks as on one: q is half of it, k and v a quarter
        heads = [
            part.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in fused.split([half, half // 2, half // 2], dim=-1)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class EmbedFirst(nn.Module):
    """[seq, batch] -> [seq, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(example().VOCAB, example().WIDTH)
        self.places = nn.Embedding(example().SEQ_LEN, example().WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places.weight[:, None]


class SequenceFirst(nn.Module):
    """A block that takes [seq, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        width = example().WIDTH
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


def build(variant: str) -> nn.Module:
    """The whole model of a variant, float64, always with the same weights."""
    torch.manual_seed(3)
    model: Any = example().Decoder()
    if "tied" in variant:
        model.head.weight = model.embed.tokens.weight
    if variant == "grouped":
        for block in model.blocks:
            block.attention = GroupedAttention()
    if variant == "sequence first":
        model.embed, model.blocks = EmbedFirst(), nn.ModuleList(SequenceFirst() for _ in range(4))
    return model.double()


def plan_of(variant: str) -> SplitPlan:
    plan: SplitPlan = example().PLAN
    width = example().WIDTH
    if variant == "grouped":
        outputs = {"q": width, "k": Rows(width // 2), "v": width // 2}
        return replace(plan, modules={**plan.modules, "blocks.*.attention.qkv": outputs})
    if variant == "sequence first":
        modules = {name: r for name, r in plan.modules.items() if "blocks" not in name}
        ours = {"blocks.*.norm": "sequence", "blocks.*.wide": "column", "blocks.*.narrow": "row"}
        return replace(plan, modules={**modules, **ours}, sequence_dim=0)
    return plan


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    shape = (BATCH, example().SEQ_LEN + 1)
    return torch.randint(example().VOCAB, shape, generator=generator)


def alone(variant: str) -> Curve:
    """The curve of the whole model in plain PyTorch."""
    model = build(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        tokens = tokens_of(step)
        ids = tokens[:, :-1].t() if variant == "sequence first" else tokens[:, :-1]
        targets = tokens[:, 1:].t() if variant == "sequence first" else tokens[:, 1:]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids).flatten(0, -2), targets.flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def reference(variants: list[str]) -> dict[str, Curve]:
    """Of each variant."""
    return {variant: alone(variant) for variant in variants}


def curves(wanted: dict[tuple[int, int, int], list[str]]) -> dict[Any, Curve]:
    """The curve of each variant in each layout (tp, pp, dp)."""
    found = {}
    for layout, variants in wanted.items():
        groups = groups_of(layout)
        for variant in variants:
            part = part_of(variant, groups)
            sizes = [2, 1, 4, 2, 1] if variant == "other micro-batches" else [MICRO] * STEPS
            optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)
            found[layout, variant] = train(part, optimizer, sizes=sizes)
        groups.close()
    return found


def groups_of(layout: tuple[int, int, int]) -> Any:
    device = torch.device("cpu")
    return create_groups(
        ParallelLayout(*layout), rank=dist.get_rank(), device=device, timeout_s=120.0
    )


def part_of(variant: str, groups: Any) -> SplitModel[Tensor]:
    whole = build(variant)
    values = {name: value.detach().clone() for name, value in whole.named_parameters()}
    turned = variant == "sequence first"

    def turn(tokens: Tensor) -> Tensor:
        return tokens.t() if turned else tokens

    seq_len, width = example().SEQ_LEN, example().WIDTH
    part = split(
        whole.to("meta") if variant == "from meta" else whole,
        plan_of(variant),
        groups,
        inputs=lambda tokens: turn(tokens[:, :-1]),
        loss=lambda logits, tokens: cross_entropy(logits, turn(tokens[:, 1:]), groups),
        message_shape=(seq_len, MICRO, width) if turned else (MICRO, seq_len, width),
        parallel=VARIANTS[variant],
    )
    if variant == "from meta":
        part.materialise(lambda name, tensor: tensor.copy_(_stored(values, name)))
    return part


def _stored(values: dict[str, Tensor], name: str) -> Tensor:
    """A value by its stored name: a fused layer's outputs have names of their own."""
    module, _, kind = name.rpartition(".")
    layer, _, output = module.rpartition(".")
    if output in ("q", "k", "v"):
        return values[f"{layer}.qkv.{kind}"].chunk(3)["qkv".index(output)]
    return values[name]


def train(
    part: SplitModel[Tensor],
    optimizer: torch.optim.Optimizer,
    steps: range = range(STEPS),
    sizes: Sequence[int] = (MICRO,) * STEPS,
) -> Curve:
    """Losses and norms, with micro-batches of a size of its own in each step."""
    losses, norms = [], []
    layout, place = part.groups.layout, part.groups.place
    for step in steps:
        mine = tokens_of(step).chunk(layout.dp)[place.dp_rank].split(sizes[step])
        optimizer.zero_grad()  # habit; must do no harm
        losses.append(part.forward_backward(mine))
        norms.append(part.clip_gradients(CLIP))
        optimizer.step()
    return losses, norms


def moves(folder: Path, layouts: list[tuple[int, int, int]]) -> list[Curve]:
    """What the rest of a run gives in each layout, saved after 2 steps by the first of them."""
    variant = "tied, sequence"
    found = []
    for number, layout in enumerate(layouts):
        groups = groups_of(layout)
        part = part_of(variant, groups)
        optimizer = torch.optim.AdamW(part.parameters(), lr=0.5 if number else 0.01)
        state = {"training": part.state(optimizer), "note": {"epoch": 1 if number else 7}}
        if number == 0:
            train(part, optimizer, range(2))
            tensors, shards, tree = flatten(state)
            checkpointer(folder, groups).save(
                2, tensors, shards=shards, rank_state={}, common={"tree": tree}, wait=True
            )
        resumed = load_user_state(checkpointer(folder, groups), state)
        assert resumed is not None
        assert state["note"] == {"epoch": 7}
        found.append(train(part, optimizer, range(2, STEPS)))
        groups.close()
    return found


def odd_models(folder: Path) -> dict[str, Any]:
    """On two stages: units that are one module, a stage without anything to train, early saves."""
    groups = groups_of((1, 2, 1))
    found: dict[str, Any] = {}
    for name in ("shared activation", "frozen first stage"):
        act = nn.Tanh()
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4).double() for _ in range(4)]
        model = nn.Sequential(*(unit for layer in layers for unit in (layer, act)))
        if name == "frozen first stage":
            for layer in layers[:2]:
                layer.requires_grad_(False)
        x = torch.arange(8.0, dtype=torch.float64).reshape(2, 4)
        model(x).square().mean().backward()
        expected = {
            f"{2 * index}.weight": layer.weight.grad.clone()
            for index, layer in enumerate(layers)
            if layer.weight.grad is not None
        }
        for layer in layers:
            layer.weight.grad = None
        part = split(
            model,
            SplitPlan(units=["*"]),
            groups,
            inputs=lambda batch: batch,
            loss=lambda output, _: output.square().mean(),
            message_shape=(2, 4),
            parallel=ParallelConfig(stage_layers=[4, 4]),
        )
        part.forward_backward([x])
        found[name] = all(
            torch.allclose(parameter.grad, expected[key], rtol=1e-12)
            for key, parameter in part.named_parameters()
            if key in expected and parameter.grad is not None
        )
    optimizer = torch.optim.AdamW(part.parameters(), lr=torch.tensor(0.25))
    state = {"training": part.state(optimizer)}
    tensors, shards, tree = flatten(state)  # before the first step
    checkpointer(folder, groups).save(
        0, tensors, shards=shards, rank_state={}, common={"tree": tree}, wait=True
    )
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    assert load_user_state(checkpointer(folder, groups), state) is not None
    found["a rate that is a tensor"] = float(optimizer.param_groups[0]["lr"]) == 0.25
    found["no moments yet"] = not optimizer.state
    groups.close()
    return found


# ---------------------------------------------------------------------------------- Hugging Face

LLAMA_PLAN = SplitPlan(
    modules={
        "model.embed_tokens": "vocabulary",
        "model.layers.*.self_attn.[qkv]_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_proj": "column",
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
        "lm_head": "column",
    }
)
GPT_NEOX_PLAN = SplitPlan(
    modules={
        "gpt_neox.embed_in": "vocabulary",
        "gpt_neox.layers.*.attention.query_key_value": "column",  # head by head
        "gpt_neox.layers.*.attention.dense": "row",
        "gpt_neox.layers.*.mlp.dense_h_to_4h": "column",
        "gpt_neox.layers.*.mlp.dense_4h_to_h": "row",
        "lm_head": "column",
    }
)


def hugging_face_model(family: str) -> tuple[nn.Module, SplitPlan]:
    """A small model of theirs with random weights, float64."""
    import transformers

    torch.manual_seed(4)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
    if family == "llama":
        config: Any = transformers.LlamaConfig(**sizes, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config).double(), LLAMA_PLAN
    config = transformers.GPTNeoXConfig(**sizes)
    return transformers.GPTNeoXForCausalLM(config).double(), GPT_NEOX_PLAN


def hugging_face_curves(tp: int) -> dict[str, tuple[Curve, Curve]]:
    """Their models alone, and split over tp ranks."""
    groups = groups_of((tp, 1, 1))
    found = {}
    for family in ("llama", "gpt_neox"):
        model, plan = hugging_face_model(family)
        part = split(
            model,
            plan,
            groups,
            inputs=lambda tokens: tokens[:, :-1],
            loss=lambda logits, tokens: cross_entropy(logits, tokens[:, 1:], groups),
            call=lambda unit, ids, _: unit(input_ids=ids, use_cache=False).logits,
        )
        curve = train(part, torch.optim.AdamW(part.parameters(), lr=0.01))
        found[family] = hugging_face_alone(family), curve
    groups.close()
    return found


def hugging_face_alone(family: str) -> Curve:
    model, _ = hugging_face_model(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        tokens = tokens_of(step)
        optimizer.zero_grad()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms
