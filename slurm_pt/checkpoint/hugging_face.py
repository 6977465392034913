"""Checkpoints from and to Hugging Face folders, in blocks of rows: never a whole tensor in memory.

    config.json  model.safetensors (or model-00001-of-00004.safetensors ... and an index)

What comes in is a checkpoint of step 0 that has weights alone, for `train.init_from`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slurm_pt.checkpoint import store
from slurm_pt.checkpoint.store import FileRecord, Manifest
from slurm_pt.checkpoint.tensor_bytes import BoxReader, write_tensors
from slurm_pt.checkpoint.tensor_index import (
    INDEX,
    StoredTensor,
    TensorKind,
    lay_out,
    read_headers,
    render_index,
    tensor_file,
)
from slurm_pt.checkpoint.whole_model import WholeModel
from slurm_pt.config.schema import ModelConfig
from slurm_pt.errors import CheckpointError
from slurm_pt.training.hugging_face import TheirTensor, from_their_config, their_tensors

SHARD_BYTES = 2 * 2**30
"""Of one file. A larger tensor has a file of its own."""
BLOCK_BYTES = 32 * 2**20
"""Of the rows of a tensor that are in memory at once, as they are stored."""
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
    records = _write_ours(source, config, temporary, vocab_size=padded)
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
class _Outgoing:
    """A tensor to be written."""

    kind: TensorKind
    blocks: Callable[[], Iterable[Tensor]]
    """Its rows, some at a time."""


def _write_ours(
    source: Path, config: ModelConfig, folder: Path, *, vocab_size: int
) -> dict[str, FileRecord]:
    theirs = _their_headers(source)
    reader = BoxReader(source)

    def outgoing(name: str, entry: TheirTensor) -> _Outgoing:
        stored = _find(theirs, entry.name, source)
        transposed = entry.transposed and len(stored.shape) == 2
        shape = stored.shape[::-1] if transposed else stored.shape
        rows = shape[0] // entry.count
        filled = max(rows, vocab_size) if name in VOCABULARY else rows
        kind = TensorKind(f"model/{name}", stored.dtype, (filled, *shape[1:]))

        def blocks() -> Iterator[Tensor]:
            for begin, count in _blocks_of(rows, kind):
                first = entry.index * rows + begin
                if transposed:
                    yield reader.read(stored, (0, first), (shape[1], count)).t()
                else:
                    at = (first, *(0 for _ in shape[1:]))
                    yield reader.read(stored, at, (count, *shape[1:]))
            for _, count in _blocks_of(filled - rows, kind):
                yield torch.zeros(count, *shape[1:], dtype=stored.dtype)

        return _Outgoing(kind, blocks)

    tensors = [outgoing(name, entry) for name, entry in their_tensors(config).items()]
    records = _write_files(tensors, folder, tensor_file)
    index = read_headers(folder / name for name in records)
    records[INDEX] = store.write_file(folder / INDEX, render_index(index).encode())
    return records


def _their_headers(folder: Path) -> dict[str, StoredTensor]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} has no *.safetensors files")
    return read_headers(paths)


def _find(theirs: Mapping[str, StoredTensor], name: str, folder: Path) -> StoredTensor:
    # The published GPT-2 weights are those of the model without its head, named without it.
    for known in (name, name.removeprefix("transformer.")):
        if known in theirs:
            return theirs[known]
    raise CheckpointError(f"{folder} has no tensor {name}")


def _blocks_of(rows: int, kind: TensorKind) -> Iterator[tuple[int, int]]:
    """Begin and length of blocks that are at most BLOCK_BYTES, or one row."""
    row_bytes = max(1, kind.size_bytes // max(1, kind.shape[0]))
    step = max(1, BLOCK_BYTES // row_bytes)
    for begin in range(0, rows, step):
        yield begin, min(step, rows - begin)


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
    groups: dict[str, list[tuple[TheirTensor, _Part]]] = {}
    for ours, entry in their_tensors(config).items():
        shape = model.shape(ours)
        if ours in VOCABULARY:
            shape = _without_filling(shape, config.vocab_size, ours)
        groups.setdefault(entry.name, []).append((entry, _Part(ours, shape)))
    tensors = [
        _theirs_of(members[0][0], [part for _, part in members], model, dtype)
        for members in groups.values()
    ]
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty. Choose a new folder")
    target.mkdir(parents=True, exist_ok=True)
    files = _write_files(tensors, target, lambda number: f"part-{number}.safetensors")
    written = _name_as_they_do(target, list(files))
    (target / "config.json").write_text(json.dumps(dict(their_config), indent=2) + "\n")
    return [*written, target / "config.json"]


class _Part(NamedTuple):
    """One of our tensors, or its first rows."""

    name: str
    shape: tuple[int, ...]


def _without_filling(shape: tuple[int, ...], vocab_size: int, name: str) -> tuple[int, ...]:
    """The rows that stand for a token; more cannot be had."""
    rows, width = shape
    if rows < vocab_size:
        raise CheckpointError(f"{name} has {rows} rows: the vocabulary cannot be {vocab_size}")
    return (vocab_size, width)


def _theirs_of(
    entry: TheirTensor, parts: Sequence[_Part], model: WholeModel, dtype: str | None
) -> _Outgoing:
    """One of their tensors, of ours that are side by side in it."""
    number_format = model.dtype(parts[0].name) if dtype is None else getattr(torch, dtype)
    transposed = entry.transposed and len(parts[0].shape) == 2
    rows = sum(part.shape[0] for part in parts)
    width = parts[0].shape[1:]
    shape = (*width, rows) if transposed else (rows, *width)
    kind = TensorKind(entry.name, number_format, shape)

    def blocks() -> Iterator[Tensor]:
        if transposed:
            for begin, count in _blocks_of(shape[0], kind):
                columns = [
                    model.read(part.name, (0, begin), (part.shape[0], count)) for part in parts
                ]
                yield torch.cat(columns).t().to(number_format)
            return
        at = tuple(0 for _ in width)
        for part in parts:
            for begin, count in _blocks_of(part.shape[0], kind):
                yield model.read(part.name, (begin, *at), (count, *width)).to(number_format)

    return _Outgoing(kind, blocks)


def _write_files(
    tensors: Iterable[_Outgoing], folder: Path, name_of: Callable[[int], str]
) -> dict[str, FileRecord]:
    """The files that hold the tensors, none of them above SHARD_BYTES but for a larger tensor."""
    files: list[list[_Outgoing]] = [[]]
    for tensor in tensors:
        held = sum(other.kind.size_bytes for other in files[-1])
        if files[-1] and held + tensor.kind.size_bytes > SHARD_BYTES:
            files.append([])
        files[-1].append(tensor)
    records = {}
    for number, held_here in enumerate(files):
        # Large elements first: then each tensor starts at a multiple of its element size.
        held_here.sort(key=lambda tensor: -tensor.kind.dtype.itemsize)
        name, kinds = name_of(number), [tensor.kind for tensor in held_here]
        header, places = lay_out(name, kinds, metadata={"format": "pt"})
        blocks = (block for tensor in held_here for block in tensor.blocks())
        records[name] = write_tensors(folder / name, header, blocks)
        if records[name].size_bytes != places[-1].start_bytes + places[-1].size_bytes:
            raise CheckpointError(f"{folder / name} is not as long as its header says")
    return records


def _name_as_they_do(folder: Path, names: Sequence[str]) -> list[Path]:
    """model.safetensors, or numbered files with an index."""
    if len(names) == 1:
        return [(folder / names[0]).rename(folder / "model.safetensors")]
    weight_map: dict[str, str] = {}
    total, paths = 0, []
    for number, name in enumerate(names, start=1):
        final = f"model-{number:05d}-of-{len(names):05d}.safetensors"
        paths.append((folder / name).rename(folder / final))
        stored = read_headers([paths[-1]])
        total += sum(chunk.place.size_bytes for one in stored.values() for chunk in one.chunks)
        weight_map |= dict.fromkeys(stored, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n")
    return [*paths, path]
