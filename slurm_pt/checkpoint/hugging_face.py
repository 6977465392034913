"""Checkpoints from and to Hugging Face folders, tensor by tensor: never the whole model in memory.

    config.json  model.safetensors (or model-00001-of-00004.safetensors ... and an index)

What comes in is a checkpoint of step 0 that has weights alone, for `checkpoint.init_from`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slurm_pt.checkpoint import store
from slurm_pt.checkpoint.store import FileRecord, Manifest
from slurm_pt.checkpoint.tensor_files import INDEX, render_index, tensor_file
from slurm_pt.checkpoint.whole_model import WholeModel
from slurm_pt.config.schema import ModelConfig
from slurm_pt.errors import CheckpointError
from slurm_pt.training.hugging_face import TheirTensor, from_their_config, their_tensors

SHARD_BYTES = 2 * 2**30
"""Of one file: what a conversion holds in memory, besides one tensor."""
_BESIDE = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "generation_config.json",
)
VOCABULARY = ("embedding.tokens.weight", "head.weight")


def convert_from(source: Path, target: Path, *, vocab_multiple: int = 1) -> ModelConfig:
    """Our configuration of the model in `source`, whose weights are in `target` on return.

    Args:
        source: A Hugging Face folder with safetensors files.
        target: A new folder: `step_00000000/`, `model/converted.yaml`, and their small files.
        vocab_multiple: Fill the vocabulary up with rows of zeros to a multiple of this, so that
            tp divides it.

    Raises:
        ConfigError: A kind of model that ours does not equal.
        CheckpointError: Files are missing, or are not the model that config.json describes.
    """
    theirs = read_their_config(source)
    config = from_their_config(theirs)
    padded = -(-config.vocab_size // vocab_multiple) * vocab_multiple
    target.mkdir(parents=True, exist_ok=True)
    temporary = store.prepare(target, 0)
    if temporary is None:
        raise CheckpointError(f"{target} holds a converted model already. Choose another folder")
    with open_their_files(source) as files:
        records = _write_ours(files, config, temporary, vocab_size=padded)
    manifest = Manifest(
        step=0,
        layout={"tp": 1, "pp": 1, "dp": 1},
        world_size=1,
        versions={},
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        files=records,
        common={"source": "hugging face", "vocab_size": config.vocab_size},
    )
    store.commit(temporary, manifest)
    ours = replace(config, vocab_size=padded)
    _write_description(source, target, ours)
    return ours


def read_their_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`."""
    try:
        content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is not a Hugging Face model: config.json cannot be read ({error})"
        ) from None
    return content


@dataclass(frozen=True)
class TheirFiles:
    """Their tensors, read in parts from files that are mapped, not loaded."""

    folder: Path
    handles: Mapping[str, Any]
    """By tensor name."""

    def read(self, entry: TheirTensor) -> Tensor:
        """Our tensor, whole, out of theirs."""
        # The published GPT-2 weights are those of the model without its head, named without it.
        bare = entry.name.removeprefix("transformer.")
        name = next((name for name in (entry.name, bare) if name in self.handles), None)
        if name is None:
            raise CheckpointError(f"{self.folder} has no tensor {entry.name}")
        lazy = self.handles[name].get_slice(name)
        shape = lazy.get_shape()
        dim = len(shape) - 1 if entry.transposed else 0  # of the output features
        size = shape[dim] // entry.count
        part = slice(entry.index * size, (entry.index + 1) * size)
        tensor: Tensor = lazy[:, part] if dim == 1 else lazy[part]
        return tensor.t().contiguous() if entry.transposed else tensor


@contextmanager
def open_their_files(folder: Path) -> Iterator[TheirFiles]:
    """The tensors of a folder, for as long as the context lasts."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} has no *.safetensors files")
    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for path in paths:
            file = stack.enter_context(safe_open(path, "pt"))
            handles |= dict.fromkeys(file.keys(), file)
        yield TheirFiles(folder, handles)


def _write_ours(
    files: TheirFiles, config: ModelConfig, folder: Path, *, vocab_size: int
) -> dict[str, FileRecord]:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, entry in their_tensors(config).items():
            tensor = files.read(entry)
            if name in VOCABULARY and vocab_size > tensor.shape[0]:
                fill = tensor.new_zeros(vocab_size - tensor.shape[0], *tensor.shape[1:])
                tensor = torch.cat([tensor, fill])
            yield f"model/{name}", tensor

    names = _write_shards(tensors(), folder, tensor_file)
    records = {name: store.describe_file(folder / name) for name in names}
    records[INDEX] = store.write_file(folder / INDEX, render_index(folder, names).encode())
    return records


def _write_description(source: Path, target: Path, config: ModelConfig) -> None:
    """A Hydra group file for `--config-dir`, and their small files for the way back."""
    values = {k: v.value if isinstance(v, Enum) else v for k, v in asdict(config).items()}
    lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
    (target / "model").mkdir(exist_ok=True)
    text = "\n".join(["defaults:", "  - schema", "  - _self_", *lines]) + "\n"
    (target / "model" / "converted.yaml").write_text(text, encoding="utf-8")
    kept = target / "hugging_face"
    kept.mkdir(exist_ok=True)
    for pattern in ("config.json", *_BESIDE):
        for path in source.glob(pattern):
            shutil.copyfile(path, kept / path.name)


def convert_to(
    model: WholeModel, target: Path, *, their_config: Mapping[str, Any], dtype: str | None
) -> list[Path]:
    """The files of a Hugging Face folder with the weights of a model.

    Args:
        model: What `open_model` gives for a committed checkpoint.
        target: A new folder.
        their_config: What config.json is to hold; it says which model it is.
        dtype: Of the stored weights, such as bfloat16; None: as they are.
    """
    config = from_their_config(dict(their_config))
    model.require(their_tensors(config))
    groups: dict[str, list[tuple[str, TheirTensor]]] = {}
    for ours, entry in their_tensors(config).items():
        groups.setdefault(entry.name, []).append((ours, entry))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, members in groups.items():
            parts = [model.read(ours) for ours, _ in members]
            if members[0][0] in VOCABULARY:
                parts = [part[: config.vocab_size] for part in parts]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
            tensor = tensor.t().contiguous() if members[0][1].transposed else tensor
            yield name, tensor if dtype is None else tensor.to(getattr(torch, dtype))

    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty. Choose a new folder")
    target.mkdir(parents=True, exist_ok=True)
    names = _write_shards(tensors(), target, lambda number: f"part-{number}.safetensors")
    written = _name_as_they_do(target, names)
    (target / "config.json").write_text(json.dumps(dict(their_config), indent=2) + "\n")
    return [*written, target / "config.json"]


def _write_shards(tensors: Iterator[tuple[str, Tensor]], folder: Path, name_of: Any) -> list[str]:
    """The names of the files that hold the tensors, none of them much above SHARD_BYTES."""
    names: list[str] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        if held:
            names.append(name_of(len(names)))
            save_file(held, folder / names[-1], metadata={"format": "pt"})
            held.clear()

    for name, tensor in tensors:
        if sum(kept.nbytes for kept in held.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor.contiguous()
    flush()
    return names


def _name_as_they_do(folder: Path, names: list[str]) -> list[Path]:
    """model.safetensors, or numbered files with an index."""
    if len(names) == 1:
        return [(folder / names[0]).rename(folder / "model.safetensors")]
    weight_map: dict[str, str] = {}
    total, paths = 0, []
    for number, name in enumerate(names, start=1):
        final = f"model-{number:05d}-of-{len(names):05d}.safetensors"
        paths.append((folder / name).rename(folder / final))
        total += paths[-1].stat().st_size
        with safe_open(paths[-1], "pt") as file:
            weight_map |= dict.fromkeys(file.keys(), final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n")
    return [*paths, path]
