from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from slurm_pt.config import DType, RunConfig, read_config, read_job_config
from slurm_pt.config.door import LONGEST_SIGNAL_LEAD_S
from slurm_pt.errors import ConfigError
from tests.builders import problems_of, small_config

NAN = float("nan")


def test_a_valid_configuration_becomes_frozen_and_typed():
    config = read_config(small_config(train__dtype="bfloat16", train__lr=1, slurm__mem=64))
    assert isinstance(config, RunConfig)
    assert config.train.dtype is DType.bfloat16
    assert config.train.lr == 1.0
    assert isinstance(config.train.lr, float)
    assert config.slurm.mem == "64"  # YAML reads it as a number
    assert config.model.ffn_size == 256
    with pytest.raises(AttributeError):
        config.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "rule", "fix"),
    [
        ("train.lrr", 1, "there is no such key; did you mean lr", "use one of steps, global"),
        ("trian", {}, "there is no such key; did you mean train?", "use one of name, run_root"),
        ("train.steps", "???", "a value is required", "set train.steps=..."),
        ("train.steps", "ten", "must be of type int", "give a value of type int"),
        ("train.steps", 10.0, "must be of type int", "give a value of type int"),
        ("train.steps", True, "must be of type int", "give a value of type int"),
        ("train.lr", "high", "must be of type float", "give a value of type float"),
        ("train.dtype", "float23", "not one of the choices", "did you mean float"),
        ("train.dtype", ["float32"], "not one of the choices", "use one of float32, float64"),
        ("model.tie_embeddings", 1, "must be of type bool", "give a value of type bool"),
        ("slurm.setup", "module load x", "must be of type list", "give a value of type list"),
        ("slurm", 5, "a section of keys", "set slurm.KEY=..."),
        ("name", "a/b", "part of file names", "name=gpt"),
        ("name", "", "part of file names", "name=gpt"),
        ("name", "-rf", "part of file names", "name=gpt"),
        ("name", "n" * 101, "part of file names", "name=gpt"),
        ("parallel.tp", 0, "must be at least 1", "set parallel.tp=1 or more"),
        ("parallel.pp", 0, "must be at least 1", "set parallel.pp=1 or more"),
        ("parallel.dp", -1, "must be at least 1", "set parallel.dp=1 or more"),
        ("slurm.nodes", 0, "must be at least 1", "set slurm.nodes=1 or more"),
        ("slurm.cpus_per_task", 0, "must be at least 1", "set slurm.cpus_per_task=1"),
        ("slurm.array_parallelism", 0, "must be at least 1", "set slurm.array_parallelism=1"),
        ("checkpoint.keep_last", 0, "must be at least 1", "set checkpoint.keep_last=1"),
        ("cluster.ranks_per_node", 0, "must be at least 1", "set cluster.ranks_per_node=1"),
        ("cluster.start_timeout_s", 0, "must be at least 1", "set cluster.start_timeout_s=1"),
        ("cluster.collective_timeout_s", 0, "at least 1", "set cluster.collective_timeout_s=1"),
        ("cluster.device", "tpu", "unknown device", "use auto, cpu or cuda"),
        ("checkpoint.interval_s", -1.0, "must not be negative", "set checkpoint.interval_s=0"),
        ("checkpoint.interval_s", NAN, "must be a finite number", "give a number"),
        ("monitor.heartbeat_s", -1.0, "must not be negative", "set monitor.heartbeat_s=0"),
        ("monitor.comment_s", -1.0, "must not be negative", "set monitor.comment_s=0"),
        ("monitor.poll_s", -1.0, "must not be negative", "set monitor.poll_s=0"),
        ("slurm.signal_lead_s", -1, "must not be negative", "set slurm.signal_lead_s=0"),
        ("slurm.signal_lead_s", LONGEST_SIGNAL_LEAD_S + 1, "65535 s before", "set it to 120"),
        ("slurm.max_failures", -1, "must not be negative", "set slurm.max_failures=0"),
        ("slurm.mem", "1.5G", "whole number and one of K, M, G, T", "set slurm.mem=1536M"),
        ("slurm.mem_per_cpu", "64GiB", "whole number", "set slurm.mem_per_cpu=64G"),
        ("slurm.mem_per_gpu", "", "whole number", "set slurm.mem_per_gpu=64G"),
        ("slurm.time", "24h", "days-hours:minutes", "2:00:00 for two hours"),
        ("slurm.partition", "None", "not a name", "leave slurm.partition at null"),
        ("slurm.qos", "", "not a name", "leave slurm.qos at null"),
        ("slurm.account", " ", "not a name", "leave slurm.account at null"),
        ("slurm.constraint", "a\nb", "not a name", "leave slurm.constraint at null"),
        ("slurm.reservation", "none", "not a name", "leave slurm.reservation at null"),
        ("slurm.job_name", "a\n#SBATCH --uid=0", "not a name", "leave slurm.job_name at null"),
        ("slurm.nodelist", "n1\r", "not a name", "leave slurm.nodelist at null"),
        ("slurm.exclude", "", "not a name", "leave slurm.exclude at null"),
        ("slurm.gres", "", "not a name", "leave slurm.gres at null"),
        ("slurm.dependency", "\x00", "not a name", "leave slurm.dependency at null"),
        ("model.num_layers", 0, "must be at least 1", "set model.num_layers=1"),
        ("model.hidden_size", 0, "must be at least 1", "set model.hidden_size=1"),
        ("model.num_heads", 0, "must be at least 1", "set model.num_heads=1"),
        ("model.vocab_size", 0, "must be at least 1", "set model.vocab_size=1"),
        ("model.max_seq_len", 0, "must be at least 1", "set model.max_seq_len=1"),
        ("model.ffn_hidden_size", 0, "must be at least 1", "set model.ffn_hidden_size=1"),
        ("train.steps", 0, "must be at least 1", "set train.steps=1"),
        ("train.global_batch_size", 0, "must be at least 1", "set train.global_batch_size=1"),
        ("train.micro_batch_size", 0, "must be at least 1", "set train.micro_batch_size=1"),
        ("train.seq_len", 0, "must be at least 1", "set train.seq_len=1"),
        ("train.eval_batches", 0, "must be at least 1", "set train.eval_batches=1"),
        ("parallel.zero", 4, "stages 1 to 3", "set it to 0, 1, 2 or 3"),
        ("parallel.zero", -1, "stages 1 to 3", "set it to 0, 1, 2 or 3"),
        ("parallel.zero", 2, "the optimizer's state alone", "set train.engine=deepspeed"),
        ("train.engine", "megatron", "not one of the choices", "use one of native, deepspeed"),
        ("train.offload_parameters", True, "keeps weights on the device", "engine=deepspeed"),
        ("train.eval_interval", 0, "must be at least 1", "or null for never"),
        ("train.eval_interval", 5, "but data.validation_fraction=0", "validation_fraction=0.01"),
        ("data.validation_fraction", 1.0, "must be in [0, 1)", "set data.validation_fraction=0.01"),
        ("data.validation_fraction", NAN, "must be a finite number", "give a number"),
        ("data.prefetch", -1, "must not be negative", "set data.prefetch=0 or more"),
        ("data.mixture", "/a", "must be of type list", "give a value of type list"),
        ("data.mixture", [], "an empty mixture", "name a source and its weight"),
        ("train.lr", 0.0, "must be positive", "set train.lr above 0"),
        ("train.lr", float("inf"), "must be a finite number", "give a number"),
        ("train.eps", 0.0, "must be positive", "set train.eps above 0"),
        ("train.beta1", 1.0, "must be in [0, 1)", "set train.beta1=0.9"),
        ("train.beta2", NAN, "must be a finite number", "give a number"),
        ("train.loss_scale", 1e39, "no loss is finite", "set train.loss_scale=65536"),
        ("model.head_size", 0, "must be at least 1", "set model.head_size=1"),
        ("model.rope_original_seq_len", -5, "must be at least 1", "rope_original_seq_len=1"),
        ("parallel.dp", 10**9, "more than 1048576 ranks", "what the job has"),
        ("cluster.collective_timeout_s", 10**14, "must be at most", "collective_timeout_s=1800"),
        ("train.min_lr", -1.0, "must not be negative", "set train.min_lr=0"),
        ("train.min_lr", 1.0, "above train.lr=0.0003", "set train.min_lr=0.0003 or less"),
        ("train.warmup_steps", -1, "must not be negative", "set train.warmup_steps=0"),
        ("train.weight_decay", -0.1, "must not be negative", "set train.weight_decay=0"),
        ("model.init_std", -0.1, "must not be negative", "set model.init_std=0"),
        ("train.grad_clip", 0.0, "must be positive", "or null for none"),
        ("model.dropout", 1.0, "must be in [0, 1)", "set model.dropout=0.1"),
        ("model.hidden_size", 66, "divisible by model.num_heads=4", "a divisor such as 1, 2, 3,"),
        ("parallel.tp", 3, "must divide model.num_heads=4", "parallel.tp to one of 1, 2, 4"),
        ("parallel.pp", 5, "more stages than model.num_layers=4", "set parallel.pp=4 or less"),
        ("model.share_layers", 3, "must divide model.num_layers=4", "to one of 1, 2, 4"),
        ("model.share_layers", 0, "must divide model.num_layers=4", "to one of 1, 2, 4"),
        ("lora.rank", 0, "must be at least 1", "set lora.rank=8"),
        ("train.recompute_stages", ["full", "none"], "2 values for 1 stages", "=[selective], or"),
        ("train.seq_len", 129, "longer than model.max_seq_len=128", "set train.seq_len=128"),
    ],
)
def test_a_broken_rule_is_told_with_key_value_rule_and_fix(key, value, rule, fix):
    problem = problems_of(**{key.replace(".", "__"): value})[key]
    assert rule in problem.rule
    assert fix in problem.fix
    shown = str(problem)
    assert shown.startswith(f"{key}=")
    assert str(value) in shown or repr(value) in shown
    assert "To fix: " in shown


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("ntasks", 4, "written from other keys"),
        ("gres", "gpu:1", "written from other keys"),
        ("ntasks_per_node", 4, "written from other keys"),
        ("no-requeue", True, "written from other keys"),
        ("part", "high", "written from other keys"),  # sbatch takes abbreviations
        ("p", "high", "not the name of a long sbatch option"),
        ("--mail-type", "END", "not the name of a long sbatch option"),
        ("x y", 1, "not the name of a long sbatch option"),
        ("comment", "a\nb", "holds one line"),
    ],
)
def test_a_raw_option_cannot_repeat_or_smuggle_one_of_ours_f96(option, value, rule):
    found = problems_of(slurm__additional_parameters={option: value})
    assert rule in found[f"slurm.additional_parameters.{option}"].rule


def test_raw_options_that_are_none_of_ours_are_let_through():
    extra = {"mail-type": "END", "licenses": "a:2", "overcommit": True, "time_min": "10"}
    config = read_config(small_config(slurm__additional_parameters=extra))
    assert config.slurm.additional_parameters == extra


def test_two_forms_of_memory_exclude_each_other_f96():
    (problem,) = problems_of(slurm__mem="1G", slurm__mem_per_gpu="2G").values()
    assert "slurm.mem and slurm.mem_per_gpu exclude each other" in str(problem)


def source(path="/a", weight=1.0, **more):
    return {"path": path, "weight": weight, **more}


@pytest.mark.parametrize(
    ("mixture", "key", "rule", "fix"),
    [
        (["/a"], "data.mixture[0]", "not a section of keys", "the keys path, weight"),
        ([source(wight=2)], "data.mixture[0].wight", "did you mean weight", "one of path, weight"),
        (
            [{"path": "/a"}],
            "data.mixture[0].weight",
            "a value is required",
            "mixture[0].weight=...",
        ),
        ([source(weight="1")], "data.mixture[0].weight", "must be of type float", "type float"),
        ([source(), source("/b", 0)], "data.mixture[1].weight", "must be positive", "above 0"),
        ([source(weight=NAN)], "data.mixture[0].weight", "must be a finite number", "give"),
        ([source(), source()], "data.mixture[1].path", "in the mixture already", "sum of the"),
    ],
)
def test_each_source_of_a_mixture_is_checked(mixture, key, rule, fix):
    problem = problems_of(data__mixture=mixture)[key]
    assert rule in problem.rule
    assert fix in problem.fix


def test_a_path_and_a_mixture_exclude_each_other():
    (problem,) = problems_of(data__path="/a", data__mixture=[source()]).values()
    assert "data.path and data.mixture exclude each other" in str(problem)
    config = read_config(small_config(data__mixture=[source("/a", 3), source("/b", 1)]))
    assert [(part.path, part.weight) for part in config.data.mixture] == [("/a", 3.0), ("/b", 1.0)]


def test_all_broken_rules_are_told_at_once_f91():
    found = problems_of(parallel__tp=8, parallel__pp=9, train__seq_len=500, slurm__time="1d")
    assert {"parallel.tp", "parallel.pp", "train.seq_len", "slurm.time"} <= found.keys()


@pytest.mark.parametrize(
    ("heads", "hidden", "vocab", "tp"),
    [(28, 1792, 256, 8), (12, 768, 50304, 8), (12, 768, 50257, 2), (25, 1600, 50304, 2)],
)
def test_every_tensor_degree_that_is_proposed_works_f91(heads, hidden, vocab, tp):
    model = {"model__num_heads": heads, "model__hidden_size": hidden, "model__vocab_size": vocab}
    problem = problems_of(**model, parallel__tp=tp)["parallel.tp"]
    proposed = re.search(r"to one of ([0-9, ]+)", problem.fix)[1].strip(", ").split(", ")
    for degree in proposed:
        read_config(small_config(**model, parallel__tp=int(degree)))


def test_a_vocabulary_that_fits_the_tensor_degree_is_proposed_f91():
    problem = problems_of(model__vocab_size=50257, parallel__tp=2)["parallel.tp"]
    assert "or model.vocab_size=50258" in problem.fix
    read_config(small_config(model__vocab_size=50258, parallel__tp=2))


@given(batch=st.integers(1, 200), micro=st.integers(1, 12), dp=st.integers(1, 12) | st.just(None))
def test_a_batch_either_divides_or_every_size_proposed_does_f93(batch, micro, dp):
    asked = {"train__micro_batch_size": micro, "parallel__dp": dp}
    try:
        read_config(small_config(train__global_batch_size=batch, **asked))
    except ConfigError as error:
        (problem,) = error.problems
        assert f"= {micro * (dp or 1)}" in problem.rule
        for size in re.findall(r"\d+", problem.fix):
            read_config(small_config(train__global_batch_size=int(size), **asked))
    else:
        assert batch % (micro * (dp or 1)) == 0


def test_a_job_configuration_lets_sections_of_a_user_be():
    config = read_job_config(
        {"name": "mine", "optimizer": {"anything": [1]}, "parallel": {"tp": 2}}
    )
    assert (config.name, config.parallel.tp) == ("mine", 2)


def test_a_job_configuration_knows_misspelt_keys_in_our_sections():
    with pytest.raises(ConfigError, match=r"slurm\.tiem=1: .*did you mean time"):
        read_job_config({"slurm": {"tiem": 1}})


def test_an_interpolation_to_nowhere_names_its_key_f68():
    cfg = OmegaConf.create({**small_config(), "name": "${model.nam}"})
    with pytest.raises(ConfigError, match=r"name=\$\{...\}: .*model\.nam.*To fix: name an exist"):
        read_config(cfg)


def test_hydras_own_node_is_not_even_resolved():
    cfg = OmegaConf.create({**small_config(), "hydra": {"x": "${hydra:runtime.cwd}"}})
    assert read_config(cfg) == read_config(small_config())


@given(
    st.dictionaries(
        st.text(max_size=5) | st.integers(),
        st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2),
        max_size=3,
    )
)
def test_whatever_stands_in_a_section_is_a_config_error_and_never_a_traceback(section):
    for name in ("model", "train", "slurm", "parallel"):
        with contextlib.suppress(ConfigError):
            read_config(small_config() | {name: section})
