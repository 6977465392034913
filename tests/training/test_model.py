"""One process: the model against Hugging Face's GPT-2, and what does not depend on the layout."""

import pytest
import torch
import torch.distributed as dist

from slurm_pt.config.schema import DType, ModelConfig
from slurm_pt.parallel.groups import create_groups
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.model import GPTStage, MicroBatch, SampleDropout

MODEL = ModelConfig(num_layers=3, hidden_size=24, num_heads=3, vocab_size=40, max_seq_len=12)


@pytest.fixture(scope="module")
def groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout = ParallelLayout(tp=1, pp=1, dp=1)
    made = create_groups(layout, rank=0, device=torch.device("cpu"), timeout_s=30.0)
    yield made
    made.close()
    dist.destroy_process_group()


def build(groups, config=MODEL, *, dtype=DType.float64, seed=0, **place):
    place = {"layers": range(config.num_layers), "first": True, "last": True, **place}
    return GPTStage(config, groups=groups, dtype=dtype, seed=seed, **place)


def micro_batch(seed=0, rows=2, seq_len=12, *, step=0, samples=None):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 40, (rows, seq_len + 1), generator=generator)
    return MicroBatch(tokens=tokens, samples=samples or tuple(range(rows)), step=step)


def stacked_heads(weight, heads):
    """Rows q, k, v of head 0, of head 1, ... in the order of GPT-2: all q, all k, all v."""
    return weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def hugging_face_names(stage):
    """Our parameters under the names and in the shapes of GPT2LMHeadModel (Conv1D: [in, out])."""
    ours = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    }
    ends = {
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    }

    def renamed(name, value):
        module, _, kind = name.rpartition(".")
        if not name.startswith("layers."):
            return f"{ends[module]}.{kind}", value
        _, index, part = module.split(".", 2)
        if part == "attention.qkv":
            value = stacked_heads(value, stage.config.num_heads)
        if kind == "weight" and value.ndim == 2:
            value = value.t()
        return f"transformer.h.{index}.{ours[part]}.{kind}", value

    return renamed


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_logits_loss_and_gradients_equal_hugging_faces_gpt2(groups, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=12, n_embd=24, n_layer=3, n_head=3, tie_word_embeddings=tied
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    theirs = transformers.GPT2LMHeadModel(config).double().train()
    stage = build(groups, ModelConfig(**{**vars(MODEL), "tie_embeddings": tied}), seed=3)
    with torch.no_grad():
        for parameter in stage.parameters():  # so that biases and norms count too
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    renamed = hugging_face_names(stage)
    weights = dict(renamed(name, value.detach()) for name, value in stage.named_parameters())
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert missing == (["lm_head.weight"] if tied else [])
    assert unexpected == []

    batch = micro_batch()
    loss = stage(None, batch)
    loss.backward()
    inputs, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
    expected_logits = theirs(inputs).logits
    expected = torch.nn.functional.cross_entropy(expected_logits.flatten(0, 1), targets.flatten())
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    gradients = {name: value.grad for name, value in theirs.named_parameters()}
    for name, parameter in stage.named_parameters():
        their_name, gradient = renamed(name, parameter.grad)
        torch.testing.assert_close(gradient, gradients[their_name], rtol=1e-9, atol=1e-14)


def test_initial_weights_have_gpt2s_spread(groups):
    config = ModelConfig(
        num_layers=8, hidden_size=64, num_heads=4, vocab_size=512, max_seq_len=64, init_std=0.02
    )
    named = dict(build(groups, config).named_parameters())
    assert named["embedding.tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert named["layers.0.ffn.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    # Two residual outputs in each of 8 layers: 0.02 / sqrt(16).
    for name in ("layers.7.ffn.down.weight", "layers.7.attention.output.weight"):
        assert named[name].std().item() == pytest.approx(0.005, rel=0.05)
    assert named["layers.3.attention_norm.weight"].unique().tolist() == [1.0]
    assert named["layers.3.attention.qkv.bias"].unique().tolist() == [0.0]
    first, second = named["layers.0.ffn.up.weight"], named["layers.1.ffn.up.weight"]
    assert not torch.equal(first, second)


def test_a_middle_stage_keeps_the_names_of_the_whole_model(groups):
    whole = dict(build(groups).named_parameters())
    middle = dict(build(groups, layers=range(1, 2), first=False, last=False).named_parameters())
    assert set(middle) == {name for name in whole if name.startswith("layers.1.")}
    for name, parameter in middle.items():
        assert torch.equal(parameter, whole[name])


def test_a_tied_head_on_its_own_stage_is_stored_as_the_embedding_and_equals_it(groups):
    first = build(groups, layers=range(1), first=True, last=False)
    last = build(groups, layers=range(1, 3), first=False, last=True)
    assert last.checkpoint_names()["head.weight"] == "embedding.tokens.weight"
    assert last.tied_copies() == {"head.weight"}
    assert first.tied_copies() == frozenset()
    assert torch.equal(last.head.weight, first.embedding.tokens.weight)


def test_every_parameter_says_how_it_is_split(groups):
    dims = build(groups).shard_dims()
    assert dims["embedding.tokens.weight"] == 0
    assert dims["layers.2.attention.qkv.bias"] == 0
    assert dims["layers.2.attention.output.weight"] == 1
    assert dims["layers.2.ffn.down.bias"] is None
    assert dims["final_norm.weight"] is None
    assert dims["embedding.positions.weight"] is None
    assert set(dims) == {name for name, _ in build(groups).named_parameters()}


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights_and_gradients(groups):
    stage = build(groups, dtype=DType.bfloat16)
    exact = build(groups, dtype=DType.float32)
    loss = stage(None, micro_batch())
    loss.backward()
    assert {parameter.dtype for parameter in stage.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in stage.parameters()} == {torch.float32}
    assert stage.dtype is torch.bfloat16
    assert loss.item() == pytest.approx(exact(None, micro_batch()).item(), rel=1e-2)


def test_dropout_is_a_function_of_seed_step_sample_and_site():
    ones = torch.ones(3, 50, 40)

    def mask(*, seed=1, step=4, samples=(7, 8, 9), site="layers.0.ffn"):
        dropout = SampleDropout(0.25, seed=seed, site=site)
        return dropout(ones, micro_batch(rows=3, step=step, samples=samples))

    reference = mask()
    assert torch.equal(mask(), reference)
    # The same sample has the same mask wherever it stands in a micro-batch.
    assert torch.equal(mask(samples=(9, 7, 3))[0], reference[2])
    for other in (mask(seed=2), mask(step=5), mask(samples=(1, 2, 3)), mask(site="embedding")):
        assert not torch.equal(other, reference)
    # 6000 draws: the share that is kept is 0.75 within 5 standard deviations of 0.0056.
    kept = reference != 0.0
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.028)
    assert torch.equal(reference[kept].unique(), torch.tensor([1 / 0.75]))


def test_no_dropout_hands_on_the_very_tensor():
    x = torch.ones(1, 2, 3)
    assert SampleDropout(0.0, seed=0, site="embedding")(x, micro_batch(rows=1)) is x
