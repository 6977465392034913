"""One process: how a model starts, what it is stored as, and what does not depend on the layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from slurm_pt.config.choices import DType
from slurm_pt.config.schema import ModelConfig, schema_of
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.shard import WHOLE, Shard
from slurm_pt.training.dropout import SampleDropout
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.model import GPTStage, StageSpan

MODEL = ModelConfig(num_layers=3, hidden_size=24, num_heads=3, vocab_size=40, max_seq_len=12)


ALONE = TensorAxis()
CONFIGS = Path(__file__).parents[2] / "hydra_configs"


def build(config=MODEL, *, dtype=DType.float64, seed=0, axis=ALONE, device="cpu", **place):
    span = StageSpan(**{"layers": range(config.num_layers), "first": True, "last": True, **place})
    return GPTStage(config, span, axis=axis, device=torch.device(device), dtype=dtype, seed=seed)


def read_preset(name):
    values = OmegaConf.load(CONFIGS / "model" / f"{name}.yaml")
    del values["defaults"]
    schema = OmegaConf.structured(schema_of(ModelConfig))
    return ModelConfig(**OmegaConf.to_container(OmegaConf.merge(schema, values)))


def micro_batch(seed=0, rows=2, seq_len=12, *, step=0, samples=None):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 40, (rows, seq_len + 1), generator=generator)
    return MicroBatch(tokens=tokens, samples=samples or tuple(range(rows)), step=step)


def test_initial_weights_have_gpt2s_spread():
    config = ModelConfig(
        num_layers=8, hidden_size=64, num_heads=4, vocab_size=512, max_seq_len=64, init_std=0.02
    )
    named = dict(build(config).named_parameters())
    assert named["embedding.tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert named["layers.0.ffn.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    # Two residual outputs in each of 8 layers: 0.02 / sqrt(16).
    for name in ("layers.7.ffn.down.weight", "layers.7.attention.output.weight"):
        assert named[name].std().item() == pytest.approx(0.005, rel=0.05)
    assert named["layers.3.attention_norm.weight"].unique().tolist() == [1.0]
    assert named["layers.3.attention.qkv.bias"].unique().tolist() == [0.0]
    first, second = named["layers.0.ffn.up.weight"], named["layers.1.ffn.up.weight"]
    assert not torch.equal(first, second)


def test_a_middle_stage_keeps_the_names_of_the_whole_model():
    whole = dict(build().named_parameters())
    middle = dict(build(layers=range(1, 2), first=False, last=False).named_parameters())
    assert set(middle) == {name for name in whole if name.startswith("layers.1.")}
    for name, parameter in middle.items():
        assert torch.equal(parameter, whole[name])


def test_a_tied_head_on_its_own_stage_is_stored_as_the_embedding_and_equals_it():
    first = build(layers=range(1), first=True, last=False)
    last = build(layers=range(1, 3), first=False, last=True)
    stored = {piece.parameter: piece.stored for piece in last.pieces()}
    assert stored["head.weight"] == "embedding.tokens.weight"
    assert last.tied_copies() == {"head.weight"}
    assert first.tied_copies() == frozenset()
    assert torch.equal(last.head.weight, first.embedding.tokens.weight)


def test_every_parameter_says_how_it_is_stored():
    stage = build(replace(MODEL, vocab_size=42), axis=TensorAxis(tp=3, rank=1), device="meta")
    shards = {piece.stored: piece.shard for piece in stage.pieces()}
    rows, columns = Shard(0, 3, 1), Shard(1, 3, 1)
    assert shards["embedding.tokens.weight"] == rows
    assert shards["layers.2.attention.key.bias"] == rows
    assert shards["layers.2.attention.output.weight"] == columns
    assert shards["layers.2.ffn.up.weight"] == rows
    assert shards["layers.2.ffn.down.bias"] == WHOLE
    assert shards["final_norm.weight"] == WHOLE
    assert shards["embedding.positions.weight"] == WHOLE
    parameters = dict(stage.named_parameters())
    assert {piece.parameter for piece in stage.pieces()} == set(parameters)
    # A fused weight is stored in three; its pieces cover it: 8 rows each of 3 * 24 / 3.
    rows_of_qkv = [p.rows for p in stage.pieces() if p.parameter == "layers.0.attention.qkv.weight"]
    assert rows_of_qkv == [slice(0, 8), slice(8, 16), slice(16, 24)]


def test_with_more_ranks_than_key_heads_neighbours_hold_the_same_one():
    config = replace(MODEL, num_heads=8, head_size=4, num_kv_heads=2)
    config = replace(config, ffn_hidden_size=32)
    stages = [build(config, axis=TensorAxis(tp=4, rank=rank), device="meta") for rank in range(4)]
    keys = [
        piece.shard
        for stage in stages
        for piece in stage.pieces()
        if piece.stored == "layers.0.attention.key.weight"
    ]
    assert keys == [Shard(0, 2, 0), Shard(0, 2, 0), Shard(0, 2, 1), Shard(0, 2, 1)]


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        # Those of the published weights; GPT-2's with its vocabulary of 50257 (models' pages).
        ("gpt2_124m", 124_439_808),
        ("gpt2_350m", 354_823_168),
        ("gpt2_774m", 774_030_080),
        ("gpt2_1_5b", 1_557_611_200),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
        ("qwen2_5_7b", 7_615_616_512),
    ],
)
def test_presets_have_the_published_number_of_parameters_and_take_no_memory(preset, parameters):
    config = read_preset(preset)
    if preset.startswith("gpt2"):
        config = replace(config, vocab_size=50257)
    stage = build(config, device="meta")
    assert sum(parameter.numel() for parameter in stage.parameters()) == parameters


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights_and_gradients():
    stage = build(dtype=DType.bfloat16)
    exact = build(dtype=DType.float32)
    loss = stage(None, micro_batch())
    loss.backward()
    assert {parameter.dtype for parameter in stage.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in stage.parameters()} == {torch.float32}
    assert stage.dtype is torch.bfloat16
    assert loss.item() == pytest.approx(exact(None, micro_batch()).item(), rel=1e-2)


def test_layers_that_share_weights_have_the_sum_of_the_gradients_of_their_copies():
    config = replace(MODEL, num_layers=4, dropout=0.1)
    shared, copies = build(replace(config, share_layers=2)), build(config)
    held, apart = dict(shared.named_parameters()), dict(copies.named_parameters())
    assert {name for name in held if name.startswith("layers.")} == {
        name for name in apart if name.startswith(("layers.0.", "layers.2."))
    }
    with torch.no_grad():
        for name, parameter in apart.items():
            parameter.copy_(held[name.replace("layers.1.", "layers.0.").replace("s.3.", "s.2.")])
    losses = [stage(None, micro_batch()) for stage in (shared, copies)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-14)
    for name, parameter in held.items():
        second = name.replace("layers.0.", "layers.1.").replace("layers.2.", "layers.3.")
        expected = apart[name].grad + (apart[second].grad if second != name else 0.0)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-11, atol=1e-16)


def test_dropout_is_a_function_of_seed_step_sample_and_site():
    def mask(*, seed=1, step=4, samples=(7, 8, 9), site="layers.0.ffn", axis=ALONE):
        dropout = SampleDropout(0.25, seed=seed, site=site, axis=axis)
        ones = torch.ones(50 // axis.tp, 3, 40)  # [seq, batch, hidden]
        return dropout(ones, micro_batch(rows=3, step=step, samples=samples))

    reference = mask()
    assert torch.equal(mask(), reference)
    # The same sample has the same mask wherever it stands in a micro-batch.
    assert torch.equal(mask(samples=(9, 7, 3))[:, 0], reference[:, 2])
    # With a split sequence each rank has its part of the same mask.
    halves = [mask(axis=TensorAxis(tp=2, rank=rank, sequence=True)) for rank in range(2)]
    assert torch.equal(torch.cat(halves), reference)
    for other in (mask(seed=2), mask(step=5), mask(samples=(1, 2, 3)), mask(site="embedding")):
        assert not torch.equal(other, reference)
    # 6000 draws: the share that is kept is 0.75 within 5 standard deviations of 0.0056.
    kept = reference != 0.0
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.028)
    assert torch.equal(reference[kept].unique(), torch.tensor([1 / 0.75]))


def test_no_dropout_hands_on_the_very_tensor():
    x = torch.ones(1, 2, 3)
    assert SampleDropout(0.0, seed=0, site="embedding", axis=ALONE)(x, micro_batch(rows=1)) is x
