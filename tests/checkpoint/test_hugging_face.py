"""From a Hugging Face folder into a run, and back: the same weights, and the same training."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from slurm_pt.checkpoint import hugging_face, store
from slurm_pt.checkpoint.hugging_face import convert_from, convert_to
from slurm_pt.checkpoint.tensor_bytes import BoxReader
from slurm_pt.checkpoint.tensor_index import read_index
from slurm_pt.checkpoint.whole_model import open_model
from slurm_pt.config.choices import Positions
from slurm_pt.config.schema import ModelConfig
from slurm_pt.errors import CheckpointError, ConfigError
from slurm_pt.training.hugging_face import from_their_config, to_their_config
from tests.training.hugging_face_cases import FAMILIES, build_theirs

TRAIN = Path(__file__).parents[2] / "train.py"


@pytest.fixture(params=FAMILIES)
def theirs(request, tmp_path):
    """A folder that transformers wrote, and its model."""
    model = build_theirs(request.param, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs", model


def reload(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return {name: parameter.detach() for name, parameter in loaded.named_parameters()}


def test_a_model_comes_back_bit_for_bit_also_in_several_files(theirs, tmp_path, monkeypatch):
    folder, model = theirs
    monkeypatch.setattr(hugging_face, "SHARD_BYTES", 20_000)
    config = convert_from(folder, tmp_path / "ours", vocab_multiple=64)
    assert config.vocab_size == 64
    step = tmp_path / "ours" / "step_00000000"
    assert store.find_damage(step) is None
    assert len(list(step.glob("*.safetensors"))) > 1
    back = tmp_path / "back"
    convert_to(
        open_model(step), back, their_config=to_their_config(config, vocab_size=40), dtype=None
    )
    assert (back / "model.safetensors.index.json").exists()
    loaded = reload(back)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[name], parameter), name


@pytest.mark.filterwarnings("ignore")
def test_gpt2_as_it_is_published_without_its_head_is_read_too(tmp_path):
    model = build_theirs("gpt2 tied", torch.float32)
    model.transformer.save_pretrained(tmp_path / "theirs")  # names without "transformer."
    convert_from(tmp_path / "theirs", tmp_path / "ours")
    step = tmp_path / "ours" / "step_00000000"
    tokens = BoxReader(step).read(read_index(step)["model/embedding.tokens.weight"])
    assert torch.equal(tokens, model.transformer.wte.weight)


def test_added_rows_of_the_vocabulary_are_zero(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build_theirs("gpt2 untied", torch.float32).save_pretrained(tmp_path / "theirs")
    convert_from(tmp_path / "theirs", tmp_path / "ours", vocab_multiple=64)
    step = tmp_path / "ours" / "step_00000000"
    head = BoxReader(step).read(read_index(step)["model/head.weight"])
    assert head.shape == (64, 32)
    assert head[40:].count_nonzero() == 0


def their_own_loop(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Five AdamW steps with the defaults of ours: matrices decay, gradients are clipped."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for batch in batches:
        logits = model(batch[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "dtype", "limit"),
    [
        # In float32 the gradient of a key's bias, which is 0, is rounding, and AdamW makes steps
        # of full size out of that.
        ("gpt2 tied", torch.float64, 1e-9),
        # Their RMSNorm computes in float32 whatever the format.
        ("llama with grouped queries", torch.float32, 1e-5),
    ],
)
def test_training_five_steps_gives_what_their_own_loop_gives(tmp_path, family, dtype, limit):
    """The commands, one after another."""
    model = build_theirs(family, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    model.to(dtype)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(9, 39)) * 40)  # ids below the vocabulary's 40
    slurm_pt = [sys.executable, "-m", "slurm_pt.cli"]

    def run(*command: str | Path) -> str:
        words = [str(word) for word in command]
        ran = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    run(*slurm_pt, "data", "prepare", text, "--out", tmp_path / "tokens")
    info = tmp_path / "tokens" / "tokens.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"vocab_size": 40}))
    run(*slurm_pt, "convert", "from-hf", tmp_path / "theirs", tmp_path / "ours")
    run(
        *(sys.executable, TRAIN, "--config-dir", tmp_path / "ours", "model=converted"),
        f"train.init_from={tmp_path}/ours/step_00000000",
        *("data=tokens", f"data.path={tmp_path}/tokens", "run_root=runs", "cluster.device=cpu"),
        *("train.steps=5", "train.seq_len=12", "train.global_batch_size=4"),
        *("train.micro_batch_size=2", "train.lr=1e-3", "train.min_lr=1e-3"),
        *(
            "train.warmup_steps=0",
            "train.seed=3",
            f"train.dtype={str(dtype).removeprefix('torch.')}",
        ),
    )
    (done,) = tmp_path.glob("runs/*/done.json")
    run(*slurm_pt, "convert", "to-hf", done.parent, tmp_path / "back")

    from slurm_pt.training.data import TokenDataset

    dataset = TokenDataset(
        tmp_path / "tokens", seq_len=12, global_batch_size=4, vocab_size=40, seed=3
    )
    their_own_loop(model, [torch.from_numpy(dataset.batch(s, range(4))) for s in range(5)])
    loaded = reload(tmp_path / "back", dtype)
    for name, parameter in model.named_parameters():
        expected = parameter.detach()
        error = ((loaded[name] - expected).norm() / expected.norm()).item()
        assert error < limit, f"{name}: {error}"


def test_configurations_go_there_and_back():
    gpt2 = ModelConfig(2, 32, 4, vocab_size=40, max_seq_len=12)
    assert from_their_config(to_their_config(gpt2)) == gpt2
    mixed = replace(gpt2, positions=Positions.rotary)
    with pytest.raises(ConfigError, match="no Hugging Face model known here"):
        to_their_config(mixed)


def test_what_is_missing_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        convert_from(tmp_path, tmp_path / "out")
    config = to_their_config(ModelConfig(2, 32, 4, vocab_size=40, max_seq_len=12))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files"):
        convert_from(tmp_path, tmp_path / "out")
    assert list((tmp_path / "out").glob("step_*[0-9]")) == []
