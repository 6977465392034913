"""Adapters as a folder that Hugging Face PEFT loads beside their base.

    adapter_config.json  adapter_model.safetensors

Source of names and keys: Hugging Face peft, `LoraConfig` and `get_peft_model_state_dict`.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from slurm_pt.checkpoint.base_model import BaseModel
from slurm_pt.checkpoint.store import read_manifest
from slurm_pt.checkpoint.whole_model import StoredTensors
from slurm_pt.config.schema import LoraConfig, ModelConfig
from slurm_pt.errors import CheckpointError
from slurm_pt.training.hugging_face import TheirTensor, their_tensors, to_their_config

_OF_A_MODEL = "base_model.model."
"""What PEFT wraps every model in."""


def export_adapters(
    checkpoint: Path,
    target: Path,
    *,
    model: ModelConfig,
    lora: LoraConfig,
    base_model: str | None,
) -> list[Path]:
    """The files of a PEFT folder with the adapters of one committed checkpoint.

    Args:
        checkpoint: A folder `step_N`.
        target: A new folder.
        model: Of the base.
        lora: What the adapters were trained with.
        base_model: Name or folder of the base, for whoever loads them; None: they know it.

    Raises:
        CheckpointError: There are no adapters, or PEFT has no place for them.
        ConfigError: Hugging Face has no such model.
    """
    to_their_config(model)  # that there is such a model
    if BaseModel.of(read_manifest(checkpoint).common) is None or lora.rank is None:
        raise CheckpointError(f"{checkpoint} holds no adapters: use `slurm-pt convert to-hf`")
    if model.share_layers > 1:
        raise CheckpointError(
            "model.share_layers: PEFT knows no layers that share an adapter. Use `slurm-pt convert "
            "to-hf`, which merges them"
        )
    stored, names = StoredTensors.of(checkpoint), their_tensors(model)
    tensors: dict[str, Tensor] = {}
    modules: set[str] = set()
    for name in stored.index:
        layer, _, factor = name.rpartition(".")
        if name.startswith("model/"):
            module = _module(names[f"{layer.removeprefix('model/')}.weight"])
            modules.add(module.rpartition(".")[2])
            theirs = {"lora_a": "lora_A", "lora_b": "lora_B"}[factor]
            tensors[f"{_OF_A_MODEL}{module}.{theirs}.weight"] = stored.read(name)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty. Choose a new folder")
    target.mkdir(parents=True, exist_ok=True)
    paths = [target / "adapter_config.json", target / "adapter_model.safetensors"]
    paths[0].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, paths[1], metadata={"format": "pt"})
    return paths


def _module(entry: TheirTensor) -> str:
    """Their linear module that one of our matrices is. Raises CheckpointError if it is a part."""
    if entry.count > 1:
        raise CheckpointError(
            f"{entry.name} is query, key and value in one, and PEFT has one adapter for all three. "
            "Use `slurm-pt convert to-hf`, which merges ours"
        )
    return entry.name.removesuffix(".weight")
