"""What ZeRO and the choice of an engine need."""

from __future__ import annotations

import pytest

from slurm_pt.config import Engine, read_config
from tests.builders import problems_of, small_config


def test_a_zero_stage_that_the_trainer_does_not_have_is_refused():
    found = problems_of(parallel__zero=2)
    assert list(found) == ["parallel.zero"]
    assert "shards the optimizer's state alone" in found["parallel.zero"].rule
    assert "set train.engine=deepspeed, or parallel.zero=1" in found["parallel.zero"].fix


def test_the_optimizers_state_may_be_split_and_be_in_host_memory():
    config = read_config(small_config(parallel__zero=1, train__offload_optimizer=True))
    assert (config.parallel.zero, config.train.offload_optimizer) == (1, True)


def test_a_tied_embedding_stays_on_the_device():
    problem = problems_of(train__offload_embedding=True)["train.offload_embedding"]
    assert "also the head" in problem.rule
    assert "set model.tie_embeddings=false" in problem.fix
    read_config(small_config(train__offload_embedding=True, model__tie_embeddings=False))


@pytest.mark.parametrize(
    ("asked", "key", "rule", "fix"),
    [
        ({}, "parallel.zero", "what the native engine does", "set parallel.zero=1, 2 or 3"),
        (
            {"parallel__zero": 1, "parallel__pp": 2},
            "parallel.pp",
            "undoes a pipeline's gain",
            "set parallel.pp=1, or train.engine=native",
        ),
        (
            {"parallel__zero": 1, "train__dtype": "float16"},
            "train.dtype",
            "refuses float16 on a CPU",
            "set train.dtype=bfloat16 or float32",
        ),
        (
            {"parallel__zero": 1, "train__dtype": "float64"},
            "train.dtype",
            "keeps float32 weights",
            "set train.dtype=bfloat16 or float32",
        ),
        (
            {"parallel__zero": 1, "parallel__tp": 4, "model__num_kv_heads": 2},
            "model.num_kv_heads",
            "counts twice",
            "set parallel.tp=2 or a divisor",
        ),
        (
            {"parallel__zero": 1, "lora__rank": 4},
            "lora.rank",
            "only the native engine has it",
            "set lora.rank=null, or train.engine=native",
        ),
        (
            {"parallel__zero": 1, "train__local_steps": 2},
            "train.local_steps",
            "only the native engine has it",
            "set train.local_steps=1, or train.engine=native",
        ),
        (
            {"parallel__zero": 1, "train__offload_embedding": True},
            "train.offload_embedding",
            "only the native engine has it",
            "set train.offload_embedding=false, or train.engine=native",
        ),
        (
            {"parallel__zero": 2, "train__offload_parameters": True},
            "train.offload_parameters",
            "but parallel.zero=2",
            "set parallel.zero=3",
        ),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(asked, key, rule, fix):
    problem = problems_of(train__engine="deepspeed", **asked)[key]
    assert rule in problem.rule
    assert fix in problem.fix


def test_deepspeed_is_asked_for_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    problem = problems_of(train__engine="deepspeed", parallel__zero=1)["train.engine"]
    assert "not installed" in problem.rule
    assert "pip install 'slurm_pt[deepspeed]'" in problem.fix
    # The ranks use another interpreter than this one: what is installed there is not known here.
    read_config(
        small_config(train__engine="deepspeed", parallel__zero=1, slurm__python="/env/bin/python")
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_deepspeed_takes_every_stage(zero):
    config = read_config(
        small_config(
            train__engine="deepspeed",
            train__offload_optimizer=True,
            train__offload_parameters=zero == 3,
            train__dtype="bfloat16",
            parallel__zero=zero,
            parallel__tp=2,
        )
    )
    assert config.train.engine is Engine.deepspeed
