from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from slurm_pt.config import signature
from tests.builders import small_config

KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=6)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="$")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
CONFIGS = st.dictionaries(KEYS, VALUES, max_size=5)


def shuffled(value):
    """The same mapping with its keys in the opposite order, all the way down."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(inner) for inner in value] if isinstance(value, list) else value


@given(CONFIGS)
def test_the_order_of_keys_does_not_matter(config):
    assert signature(config) == signature(shuffled(config))
    assert re.fullmatch("[0-9a-f]{10}", signature(config))


@given(CONFIGS)
@settings(max_examples=50)
def test_a_configuration_read_back_from_its_file_has_the_same_signature_f35(config):
    config = {key: value for key, value in config.items() if key != "hydra"}
    again = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(config)))
    assert signature(again) == signature(config)


def test_keys_of_mixed_types_can_be_signed():
    assert signature({"x": {1: "a", "b": 2}}) == signature({"x": {"b": 2, 1: "a"}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slurm__time", "1-0"),
        ("monitor__poll_s", 1.0),
        ("checkpoint__keep_last", 7),
        ("cluster__device", "cpu"),
        ("run_root", "/elsewhere"),
        ("name", "other"),
        ("data__prefetch", 7),
        ("train__offload_optimizer", True),
        ("train__offload_embedding", True),
    ],
)
def test_what_does_not_change_the_result_does_not_change_the_signature(key, value):
    assert signature(small_config(**{key: value})) == signature(small_config())


def test_who_keeps_the_optimizers_state_does_not_change_the_signature():
    split = small_config(parallel__dp=2, parallel__zero=1)
    assert signature(split) == signature(small_config(parallel__dp=2))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train__seed", 1),
        ("model__dropout", 0.1),
        ("parallel__tp", 2),
        ("data__path", "/d"),
        ("data__mask_documents", True),
    ],
)
def test_what_changes_the_result_changes_the_signature(key, value):
    assert signature(small_config(**{key: value})) != signature(small_config())


def test_the_signature_of_a_known_configuration_never_changes_f35():
    # Another value here means that every existing run folder would be taken for a new run.
    assert signature(small_config()) == "b68a8434ff"
