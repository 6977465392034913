"""Adapters belong to a base: they are merged into that one, and no other is taken for it."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from slurm_pt.checkpoint.base_model import BaseModel
from slurm_pt.checkpoint.hugging_face import convert_from, convert_to
from slurm_pt.checkpoint.peft import export_adapters
from slurm_pt.checkpoint.store import MANIFEST
from slurm_pt.checkpoint.whole_model import StoredTensors, WholeModel, open_model
from slurm_pt.config.choices import DType
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.low_rank import FACTORS
from slurm_pt.training.hugging_face import to_their_config
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.model import GPTStage, StageSpan
from tests.ranks import run_ranks
from tests.training.cases import MODEL
from tests.training.hugging_face_cases import SEQ_LEN, VOCAB, build_theirs
from tests.training.language import write_tokens
from tests.training.lora_cases import GATED

pytestmark = pytest.mark.ranks
STEP = "step_00000001"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with base/step_0, from their model, and run/step_1, adapters on it; our config."""
    root = tmp_path_factory.mktemp("adapters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build_theirs("llama with grouped queries", torch.float32).save_pretrained(root / "theirs")
    config = convert_from(root / "theirs", root / "base", vocab_multiple=256)
    tokens = write_tokens(root)
    base = root / "base" / "step_00000000"
    run_ranks(2, "tests.training.lora_cases:on_a_base", tokens, config, base, root / "run")
    return root, config


def stage_with(config, model):
    """Ours on one process, with the base and the adapters of a checkpoint."""
    stage = GPTStage(
        config,
        StageSpan(range(config.num_layers), first=True, last=True),
        axis=TensorAxis(),
        device=torch.device("cpu"),
        dtype=DType.float32,
        seed=0,
        lora=GATED,
    )
    parameters = dict(stage.named_parameters())
    with torch.no_grad():
        for piece in stage.pieces():
            held = model.adapters if piece.stored.endswith(FACTORS) else model.base
            piece.of(parameters[piece.parameter]).copy_(held.read(f"model/{piece.stored}"))
    return stage


@pytest.mark.filterwarnings("ignore")
def test_the_merged_model_gives_the_logits_of_base_and_adapters(trained, tmp_path):
    import transformers

    root, config = trained
    model = open_model(root / "run" / STEP, scale=GATED.scale)
    their_config = to_their_config(config, vocab_size=VOCAB)
    convert_to(model, tmp_path / "merged", their_config=their_config, dtype=None)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    before = transformers.AutoModelForCausalLM.from_pretrained(root / "theirs")
    tokens = torch.randint(0, VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, original = merged(tokens).logits, before(tokens).logits
        stage = stage_with(config, model)
        hidden = stage.embedding.tokens(tokens.t())
        for layer in stage.layers.values():
            hidden = layer(hidden, micro_batch(tokens))
        expected = stage.logits(hidden).transpose(0, 1)[..., :VOCAB]
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert (original - expected).norm() > 1e-3 * expected.norm()  # they had learnt something


def micro_batch(tokens):
    return MicroBatch(tokens, tuple(range(len(tokens))), 0)


def test_the_adapters_alone_have_the_names_and_keys_of_peft(trained, tmp_path):
    root, config = trained
    config_of_theirs = replace(config, vocab_size=VOCAB)
    export = {"model": config_of_theirs, "lora": GATED, "base_model": "a/b"}
    paths = export_adapters(root / "run" / STEP, tmp_path / "peft", **export)
    assert [path.name for path in paths] == ["adapter_config.json", "adapter_model.safetensors"]
    written, factors = json.loads(paths[0].read_text()), load_file(paths[1])
    assert (written["peft_type"], written["r"], written["lora_alpha"]) == ("LORA", 3, 6.0)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert set(written["target_modules"]) == set(names)
    assert len(factors) == 2 * 7 * config.num_layers
    prefix = "base_model.model.model.layers.3.mlp.down_proj.lora_"
    assert factors[f"{prefix}A.weight"].shape == (3, 48)
    assert factors[f"{prefix}B.weight"].shape == (32, 3)
    stored = StoredTensors.of(root / "run" / STEP)
    key = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
    assert torch.equal(factors[key], stored.read("model/layers.1.attention.key.lora_b"))


def test_what_peft_has_no_place_for_is_refused(trained, tmp_path):
    root, config = trained
    adapters, base = root / "run" / STEP, root / "base" / "step_00000000"
    export = {"lora": GATED, "base_model": None}
    with pytest.raises(CheckpointError, match="holds no adapters"):
        export_adapters(base, tmp_path, model=config, **export)
    with pytest.raises(CheckpointError, match="layers that share an adapter"):
        export_adapters(adapters, tmp_path, model=replace(config, share_layers=2), **export)
    gpt2 = replace(MODEL, num_layers=config.num_layers, ffn_hidden_size=None)
    with pytest.raises(CheckpointError, match="query, key and value in one"):
        export_adapters(adapters, tmp_path, model=gpt2, **export)


def test_a_base_that_was_moved_is_found_by_its_name_and_another_one_is_refused(trained, tmp_path):
    root, _ = trained
    adapters, base = root / "run" / STEP, root / "base" / "step_00000000"
    moved = shutil.copytree(base, tmp_path / "elsewhere" / base.name)
    assert open_model(adapters, base=moved).base.path == moved
    manifest = moved / MANIFEST
    manifest.write_text(manifest.read_text().replace('"hugging face"', '"somewhere else"'))
    with pytest.raises(CheckpointError, match=r"trained on .*base.*and not on .*elsewhere"):
        open_model(adapters, base=moved)
    with pytest.raises(CheckpointError, match=r"cannot be used.*--base"):
        open_model(adapters, base=tmp_path)
    with pytest.raises(CheckpointError, match="has its own weights: leave --base out"):
        open_model(base, base=moved)


def test_adapters_are_no_base(trained):
    root, _ = trained
    with pytest.raises(CheckpointError, match=r"holds adapters alone.*convert to-hf"):
        BaseModel.at(root / "run" / STEP)


def test_initial_weights_are_a_base_only_for_their_seed():
    BaseModel(seed=3).require(BaseModel(seed=3))
    with pytest.raises(CheckpointError, match=r"train\.seed=3, and not on .*train\.seed=4"):
        BaseModel(seed=3).require(BaseModel(seed=4))


def test_layers_that_share_weights_are_written_out_each(trained):
    root, config = trained
    base = StoredTensors.of(root / "base" / "step_00000000")
    shared = WholeModel(base, share_layers=2)
    for layer in range(config.num_layers):
        name = "layers.{}.ffn.down.weight"
        own = base.read("model/" + name.format(layer - layer % 2))
        assert torch.equal(shared.read(name.format(layer)), own)
    model = replace(MODEL, num_layers=4, share_layers=2)
    assert to_their_config(model)["n_layer"] == 4
