"""One process: adapters give what a plain model with adapters gives, before and after merging."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slurm_pt.config.choices import DType
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.low_rank import FACTORS
from slurm_pt.training.hugging_face import from_their_config, their_tensors
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.model import GPTStage, StageSpan
from tests.training.cases import LLAMA
from tests.training.hugging_face_cases import SEQ_LEN, VOCAB, build_theirs, ours_in
from tests.training.lora_cases import EVERYWHERE, GATED

SCALE = 2.0  # alpha 6, rank 3


class Adapted(nn.Module):
    """Any linear module, and the textbook's update of some of its output features."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.updates: list[tuple[slice, Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x).clone()
        for rows, a, b in self.updates:
            y[..., rows] += SCALE * functional.linear(functional.linear(x, a), b)
        return y


def adapt(theirs: nn.Module, name: str, index: int, count: int, a: Tensor, b: Tensor) -> None:
    """Give part `index` of `count` of a module's outputs an update."""
    parent, _, child = name.rpartition(".")
    holder = theirs.get_submodule(parent)
    if not isinstance(getattr(holder, child), Adapted):
        setattr(holder, child, Adapted(getattr(holder, child)))
    size = b.shape[0]
    holder.get_submodule(child).updates.append((slice(index * size, (index + 1) * size), a, b))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "dtype", "lora", "limit"),
    [
        ("gpt2 tied", DType.float64, EVERYWHERE, 1e-11),
        # Their RMSNorm computes in float32 whatever the format.
        ("llama with grouped queries", DType.float32, GATED, 1e-5),
    ],
)
def test_loss_and_gradients_are_those_of_a_plain_model(family, dtype, lora, limit):
    theirs = build_theirs(family, torch.float32)
    config = from_their_config(theirs.config.to_dict())
    theirs = theirs.to(getattr(torch, dtype.value)).requires_grad_(False)
    ours = GPTStage(
        config,
        StageSpan(range(config.num_layers), first=True, last=True),
        axis=TensorAxis(),
        device=torch.device("cpu"),
        dtype=dtype,
        seed=1,
        lora=lora,
    )
    parameters, names = dict(ours.named_parameters()), their_tensors(config)
    weights = {name: p.detach() for name, p in theirs.named_parameters()}
    factors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for piece in ours.pieces():
            held = piece.of(parameters[piece.parameter])
            if not piece.stored.endswith(FACTORS):
                held.copy_(ours_in(weights, names[piece.stored]))
                continue
            held.normal_(0.0, 0.1, generator=generator)  # B, too: else A has no gradient
            factors[piece.stored] = held.clone().requires_grad_()
    for stored in [name for name in factors if name.endswith("lora_a")]:
        layer = stored.removesuffix(".lora_a")
        entry = names[f"{layer}.weight"]
        module = entry.name.removesuffix(".weight")
        a, b = factors[stored], factors[f"{layer}.lora_b"]
        adapt(theirs, module, entry.index, entry.count, a, b)
    assert len(factors) == 2 * len(lora.targets) * config.num_layers

    tokens = torch.randint(0, VOCAB, (3, SEQ_LEN + 1), generator=generator)
    loss = ours(None, MicroBatch(tokens, (0, 1, 2), 0))
    loss.backward()
    logits = theirs(tokens[:, :-1]).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=limit)
    for piece in ours.pieces():
        gradient = parameters[piece.parameter].grad
        if not piece.stored.endswith(FACTORS):
            assert gradient is None
            continue
        reference = factors[piece.stored].grad
        error = (piece.of(gradient) - reference).norm() / reference.norm()
        assert error < limit, piece.stored


def test_bfloat16_gives_float32_gradients_of_the_adapters_alone():
    losses = {}
    for dtype in (DType.float32, DType.bfloat16):
        stage = GPTStage(
            LLAMA,
            StageSpan(range(2), first=True, last=True),
            axis=TensorAxis(),
            device=torch.device("cpu"),
            dtype=dtype,
            seed=1,
            lora=GATED,
        )
        tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
        loss = stage(None, MicroBatch(tokens, (0, 1), 0))
        loss.backward()
        losses[dtype] = loss.item()
        gradients = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
        assert {".lora." in name for name in gradients} == {True}
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert losses[DType.bfloat16] == pytest.approx(losses[DType.float32], rel=1e-2)
