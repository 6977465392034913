"""Loading and converting take little memory beside what is loaded."""

from __future__ import annotations

import json

import pytest
import torch

from slurm_pt.checkpoint import hugging_face, store, tensor_bytes
from slurm_pt.checkpoint.hugging_face import convert_from, convert_to
from slurm_pt.checkpoint.tensor_bytes import BoxReader, write_tensors
from slurm_pt.checkpoint.tensor_index import (
    Chunk,
    StoredTensor,
    TensorKind,
    lay_out,
    read_headers,
    read_index,
)
from slurm_pt.checkpoint.whole_model import open_model
from slurm_pt.errors import CheckpointError
from slurm_pt.training.hugging_face import from_their_config, their_tensors
from tests.checkpoint.allocations import Allocations
from tests.checkpoint.memory_cases import BUFFER_BYTES
from tests.ranks import run_ranks


@pytest.fixture
def small_buffer(monkeypatch):
    monkeypatch.setattr(tensor_bytes, "BUFFER_BYTES", 256)


def stored_file(folder, tensor):
    """A file with one tensor, and the tensor as its header says."""
    kind = TensorKind("it", tensor.dtype, tuple(tensor.shape))
    header, _ = lay_out("it.safetensors", [kind], metadata={})
    write_tensors(folder / "it.safetensors", header, [tensor])
    return read_headers([folder / "it.safetensors"])["it"]


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (40, 3), (5, 300), (3, 5, 100), (2, 2, 9, 8)])
def test_any_box_of_a_tensor_is_read_through_a_small_buffer(tmp_path, small_buffer, shape):
    """Rows that fit into the buffer, rows that do not, and boxes at both ends."""
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    stored = stored_file(tmp_path, whole)
    reader = BoxReader(tmp_path)
    assert torch.equal(reader.read(stored), whole)
    for begin in (0, 1):
        first = tuple(min(begin, size // 2) for size in shape)
        lengths = tuple(
            size - at - begin * (size > 3) for size, at in zip(shape, first, strict=True)
        )
        box = tuple(slice(at, at + size) for at, size in zip(first, lengths, strict=True))
        assert torch.equal(reader.read(stored, first, lengths), whole[box])


def test_a_box_is_put_together_from_several_chunks(tmp_path, small_buffer):
    whole = torch.arange(60 * 40, dtype=torch.float64).reshape(60, 40)
    stored = stored_file(tmp_path, torch.stack([whole[:, :20], whole[:, 20:]]))
    place = stored.chunks[0].place
    halves = tuple(
        Chunk(
            (0, 20 * part),
            (60, 20),
            type(place)(place.file, place.start_bytes + part * 9600, 9600),
        )
        for part in (0, 1)
    )
    stored = StoredTensor(whole.dtype, (60, 40), halves)
    assert torch.equal(BoxReader(tmp_path).read(stored, (3, 10), (50, 25)), whole[3:53, 10:35])


def test_another_format_and_a_target_that_lies_otherwise_are_filled(tmp_path, small_buffer):
    whole = torch.arange(50 * 30, dtype=torch.float32).reshape(50, 30)
    stored = stored_file(tmp_path, whole)
    for target in (torch.zeros(50, 30, dtype=torch.bfloat16), torch.zeros(30, 50).t()):
        BoxReader(tmp_path).fill([(stored, (0, 0), target)])
        assert torch.equal(target, whole.to(target.dtype))


@pytest.mark.parametrize(
    "damage", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}x", b"no json at all..."]
)
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage)
    if damage.endswith(b"{}x"):
        assert read_headers([path]) == {}  # a header without tensors
    else:
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
            read_headers([path])


def test_a_file_that_was_cut_is_refused_before_it_is_read(tmp_path):
    stored_file(tmp_path, torch.ones(30))
    path = tmp_path / "it.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is not in bytes 0 to 120"):
        read_headers([path])


@pytest.mark.ranks
def test_a_load_takes_no_more_than_its_buffer_beside_what_is_loaded(tmp_path):
    """At tp2 and dp2, from each other: parts of columns go through the buffer."""
    for rank in run_ranks(2, "tests.checkpoint.memory_cases:load_elsewhere", tmp_path):
        for held, taken, equal in rank:
            assert equal
            # And what ranks tell each other about the plan.
            assert taken < BUFFER_BYTES + held / 50


FAMILIES = {
    "gpt2": {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": 8},
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 8,
        "intermediate_size": 200,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_conversion_holds_a_tensor_whole(tmp_path, monkeypatch, family):
    """Blocks of 8 KiB: the vocabulary's 1000 x 64 numbers are 256 kB."""
    theirs = {**FAMILIES[family], "vocab_size": 1000, "tie_word_embeddings": False}
    config = from_their_config(theirs)
    source = tmp_path / "theirs"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(theirs))
    shapes = shapes_of(config)
    kinds = [TensorKind(name, torch.float32, shape) for name, shape in shapes.items()]
    header, _ = lay_out("model.safetensors", kinds, metadata={"format": "pt"})
    tensors = [torch.rand(kind.shape) for kind in kinds]
    write_tensors(source / "model.safetensors", header, tensors)
    monkeypatch.setattr(hugging_face, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(tensor_bytes, "BUFFER_BYTES", 8192)
    with Allocations() as taken:
        convert_from(source, tmp_path / "ours", vocab_multiple=256)
        step = tmp_path / "ours" / "step_00000000"
        convert_to(open_model(step), tmp_path / "back", their_config=theirs, dtype=None)
    assert max(taken.sizes) <= 8192
    more = {**theirs, "vocab_size": 1025}
    with pytest.raises(CheckpointError, match="has 1024 rows: the vocabulary cannot be 1025"):
        convert_to(open_model(step), tmp_path / "more", their_config=more, dtype=None)
    assert store.find_damage(step) is None
    assert read_index(step)["model/embedding.tokens.weight"].shape == (1024, 64)
    back = read_headers([tmp_path / "back" / "model.safetensors"])
    for kind, tensor in zip(kinds, tensors, strict=True):
        assert torch.equal(BoxReader(tmp_path / "back").read(back[kind.name]), tensor), kind.name


def shapes_of(config):
    """Their tensors' shapes, from what ours are."""
    wide, ffn = config.hidden_size, config.ffn_size
    shapes = {}
    for ours, entry in their_tensors(config).items():
        _, _, part = ours.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        sizes = {"up": (ffn, wide), "gate": (ffn, wide), "down": (wide, ffn)}
        sizes |= {"tokens": (config.vocab_size, wide), "positions": (config.max_seq_len, wide)}
        rows, columns = sizes.get(part, (wide, wide))
        if ours == "head.weight":
            rows = config.vocab_size
        rows *= entry.count
        is_vector = ours.endswith("bias") or "norm" in ours
        matrix = (columns, rows) if entry.transposed else (rows, columns)
        shapes[entry.name] = (rows,) if is_vector else matrix
    return shapes
