"""Our groups through Hydra itself: they compose, and what the schema does not know is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from slurm_pt.config import JobConfig, RunConfig, read_config, read_job_config
from slurm_pt.config.schema import SlurmConfig, schema_of
from slurm_pt.config.store import register_schemas
from slurm_pt.errors import ConfigError
from slurm_pt.plan import make_plan

CONFIGS = Path(__file__).parents[2] / "hydra_configs"
GROUP_FILES = sorted((path.parent.name, path.stem) for path in CONFIGS.glob("*/*.yaml"))
# What else is needed where a choice does not fit the defaults (model=tiny, train=short).
COMPANIONS = {
    ("train", "gpt2"): ["model=gpt2_124m"],
    ("data", "tokens"): ["data.path=/tokens"],
    ("lora", "all_linear"): ["model=tiny_llama"],
    ("data", "mixture"): ["data.mixture=[{path: /a, weight: 3}, {path: /b, weight: 1}]"],
}


@pytest.fixture(autouse=True, scope="module")
def our_configs():
    register_schemas()
    with initialize_config_module("slurm_pt.hydra_configs", version_base="1.3"):
        yield


def test_the_default_configuration_composes_and_passes_the_door():
    config = read_config(compose("config"))
    assert config.name == "gpt"
    assert make_plan(config).nodes == 1


def test_there_are_group_files_for_every_section():
    assert {group for group, _ in GROUP_FILES} == {
        f.name for f in dataclasses.fields(RunConfig) if f.name not in {"name", "run_root"}
    }


@pytest.mark.parametrize(("group", "choice"), GROUP_FILES)
def test_every_choice_composes_and_passes_the_door(group, choice):
    overrides = [f"{group}={choice}", *COMPANIONS.get((group, choice), [])]
    make_plan(read_config(compose("config", overrides=overrides)))


def test_the_job_part_alone_composes_for_a_program_of_ones_own():
    assert read_job_config(compose("job")) == JobConfig()


@pytest.mark.parametrize(
    "override",
    ["train.lrr=1", "trian.lr=1", "slurm.tme=1", "nme=x", "parallel.tq=2", "checkpoint.keep=1"],
)
def test_a_misspelt_key_is_refused_by_hydra(override):
    with pytest.raises(HydraException, match=override.split("=")[0].split(".")[-1]):
        compose("config", overrides=[override])


@pytest.mark.parametrize(
    "override",
    ["train.steps=ten", "train.steps=1.5", "model.tie_embeddings=maybe", "train.dtype=float23"],
)
def test_a_value_of_the_wrong_type_is_refused_by_hydra(override):
    with pytest.raises((HydraException, OmegaConfBaseException)):
        compose("config", overrides=[override])


@pytest.mark.parametrize(
    ("override", "value"),
    [("slurm.time=4:00:00", "4:00:00"), ("slurm.time=1-2:30", "1-2:30"), ("slurm.time=90", "90")],
)
def test_a_time_limit_on_the_command_line_arrives_as_it_was_typed_f95(override, value):
    assert read_config(compose("config", overrides=[override])).slurm.time == value


def test_a_missing_value_is_told_with_its_key():
    with pytest.raises(ConfigError, match=r"data\.path=\?\?\?: a value is required"):
        read_config(compose("config", overrides=["data=tokens"]))


def test_a_mixture_without_sources_is_told_and_never_taken_for_none():
    with pytest.raises(ConfigError, match=r"data\.mixture=\[\]: an empty mixture"):
        read_config(compose("config", overrides=["data=mixture"]))


def test_a_broken_rule_passes_hydra_and_is_told_by_the_door():
    with pytest.raises(ConfigError, match=r"parallel\.tp=3: must divide model\.num_heads=4"):
        read_config(compose("config", overrides=["parallel.tp=3"]))


def test_the_writable_schema_has_the_frozen_ones_fields_and_defaults():
    writable = schema_of(SlurmConfig)()
    assert {f.name: getattr(writable, f.name) for f in dataclasses.fields(SlurmConfig)} == (
        dataclasses.asdict(SlurmConfig())
    )
    writable.nodes = 3
    assert schema_of(SlurmConfig) is schema_of(SlurmConfig)
