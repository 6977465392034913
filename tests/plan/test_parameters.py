"""The formulas give what is counted in models, and what an optimizer really holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slurm_pt.config.choices import DType
from slurm_pt.config.schema import LoraConfig, TrainConfig
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.plan.parameters import adapter_parameters, model_parameters, training_bytes
from slurm_pt.training.model import GPTStage, StageSpan
from slurm_pt.training.optimizer import NamedAdamW
from tests.training.cases import LLAMA, MODEL
from tests.training.lora_cases import EVERYWHERE, GATED
from tests.training.test_model import read_preset

PRESETS = ("gpt2_124m", "gpt2_1_5b", "gpt3_175b", "llama3_8b", "llama3_405b", "qwen2_5_7b", "tiny")


def stage_of(config, *, lora, axis=None, layers=None, device="meta"):
    layers = range(config.num_layers) if layers is None else layers
    return GPTStage(
        config,
        StageSpan(layers, first=True, last=True),
        axis=axis or TensorAxis(),
        device=torch.device(device),
        dtype=DType.float32,
        seed=0,
        lora=lora,
    )


def trained_in(stage):
    return sum(p.numel() for p in stage.parameters() if p.requires_grad)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("share_layers", [1, 2])
def test_models_have_as_many_parameters_as_the_formula_says(preset, share_layers):
    config = replace(read_preset(preset), share_layers=share_layers)
    stage = stage_of(config, lora=LoraConfig())
    assert trained_in(stage) == model_parameters(config)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("targets", [["query", "value"], GATED.targets])
def test_a_rank_trains_as_many_adapter_parameters_as_the_formula_says(tp, targets):
    config = replace(read_preset("llama3_8b"), num_kv_heads=4)  # fewer than tensor ranks
    lora = LoraConfig(rank=16, targets=targets)
    stage = stage_of(config, lora=lora, axis=TensorAxis(tp=tp, rank=tp - 1), layers=range(4, 12))
    assert trained_in(stage) == adapter_parameters(config, lora, tp=tp, layers=8)


@pytest.mark.parametrize(("model", "lora"), [(MODEL, EVERYWHERE), (LLAMA, GATED)])
def test_an_optimizer_holds_as_many_bytes_as_the_formula_says(model, lora):
    stage = stage_of(model, lora=lora, device="cpu")
    trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}
    optimizer = NamedAdamW(trained, TrainConfig())
    moments = sum(m.nbytes for kind in optimizer.state().values() for m in kind.values())
    gradients = sum(p.nbytes for p in trained.values())
    assert moments + gradients == training_bytes(adapter_parameters(model, lora))
