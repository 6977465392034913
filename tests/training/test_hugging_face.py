"""Logits, loss and all gradients equal those of Hugging Face's models, in every split."""

from __future__ import annotations

import pytest

from slurm_pt.config.choices import RopeScaling
from slurm_pt.errors import ConfigError
from slurm_pt.training.hugging_face import from_their_config
from tests.ranks import run_ranks
from tests.training.hugging_face_cases import FAMILIES

LAYOUTS = {
    1: [((1, 1, 1), False)],
    2: [((2, 1, 1), False), ((2, 1, 1), True), ((1, 2, 1), False)],
    4: [((4, 1, 1), False), ((4, 1, 1), True), ((1, 4, 1), False), ((2, 2, 1), True)],
}


@pytest.fixture(scope="module")
def errors():
    """By family, layout and sequence parallelism: the errors of each rank."""
    found = {}
    for world_size, layouts in LAYOUTS.items():
        ranks = run_ranks(world_size, "tests.training.hugging_face_cases:compare_all", layouts)
        for case in ranks[0]:
            found[case] = [rank[case] for rank in ranks]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("layout", "sequence"), [case for layouts in LAYOUTS.values() for case in layouts]
)
def test_logits_and_gradients_equal_hugging_faces(errors, family, layout, sequence):
    worst: dict[str, float] = {}
    for rank in errors[family, layout, sequence]:
        for kind, error in rank.items():
            worst[kind] = max(worst.get(kind, 0.0), error)
    assert worst.keys() == {"gradients", "logits", "loss"}
    assert max(worst.values()) < 1e-5, worst


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def test_a_config_of_either_generation_of_transformers_is_read():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = from_their_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = from_their_config(LLAMA | {"rope_parameters": scaling | {"rope_theta": 5e5}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, RopeScaling.llama3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "gpt2, llama, qwen2"),
        ({"hidden_act": "relu"}, "silu"),
        ({"attention_bias": True}, "biases"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "linear and llama3"),
    ],
)
def test_a_model_that_ours_does_not_equal_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        from_their_config(LLAMA | change)
