from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from slurm_pt.config import DType, Engine, RunConfig, Schedule, read_config, read_job_config
from slurm_pt.config.choices import GradientCompression, Outer
from slurm_pt.config.door import LONGEST_SIGNAL_LEAD_S
from slurm_pt.errors import ConfigError
from tests.builders import small_config

NAN = float("nan")


def problems_of(**changes):
    with pytest.raises(ConfigError) as caught:
        read_config(small_config(**changes))
    return {problem.key: problem for problem in reversed(caught.value.problems)}


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
        ("checkpoint.interval_s", NAN, "must not be negative", "set checkpoint.interval_s=0"),
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
        ("data.validation_fraction", NAN, "must be in [0, 1)", "or 0 for none"),
        ("data.prefetch", -1, "must not be negative", "set data.prefetch=0 or more"),
        ("data.mixture", "/a", "must be of type list", "give a value of type list"),
        ("data.mixture", [], "an empty mixture", "name a source and its weight"),
        ("train.lr", 0.0, "must be positive", "set train.lr above 0"),
        ("train.lr", NAN, "must be positive", "set train.lr above 0"),
        ("train.eps", 0.0, "must be positive", "set train.eps above 0"),
        ("train.beta1", 1.0, "must be in [0, 1)", "set train.beta1=0.9"),
        ("train.beta2", NAN, "must be in [0, 1)", "set train.beta2=0.9"),
        ("train.min_lr", -1.0, "must not be negative", "set train.min_lr=0"),
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
        ([source(weight=NAN)], "data.mixture[0].weight", "must be positive", "above 0"),
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


@pytest.mark.parametrize(
    ("changes", "key", "rule", "fix"),
    [
        ({"parallel__powersgd_rank": 0}, "parallel.powersgd_rank", "at least 1", "rank=4"),
        (
            {"parallel__powersgd_start_step": -1},
            "parallel.powersgd_start_step",
            "must not be negative",
            "start_step=0 or more",
        ),
        (
            {"parallel__gradient_compression": "powersgd"},
            "parallel.powersgd_start_step",
            "nothing would be compressed in train.steps=10",
            "powersgd_start_step=1, or parallel.gradient_compression=none",
        ),
        (
            {"parallel__gradient_compression": "powersgd", "train__dtype": "float16"},
            "parallel.gradient_compression",
            "lost when train.dtype=float16 changes its loss scale",
            "set train.dtype=bfloat16",
        ),
        (
            {"parallel__gradient_compression": "bf16", "train__local_steps": 2},
            "parallel.gradient_compression",
            "with train.local_steps=2 replicas send weights",
            "or train.local_steps=1",
        ),
        (
            {"parallel__gradient_compression": "bf16", "parallel__zero": 1},
            "parallel.gradient_compression",
            "with parallel.zero=1 no replica has the whole sum",
            "or parallel.zero=0",
        ),
        (
            {"train__local_steps": 2, "parallel__zero": 1},
            "train.local_steps",
            "with parallel.zero=1 a replica updates only its own part",
            "or parallel.zero=0",
        ),
        ({"train__local_steps": 0}, "train.local_steps", "must be at least 1", "local_steps=1 or"),
        ({"train__local_after": -1}, "train.local_after", "at least 0", "local_after=0 or more"),
        (
            {"train__local_steps": 2, "train__local_after": 10},
            "train.local_after",
            "no update would be local in train.steps=10",
            "set train.local_after=5",
        ),
        ({"train__outer_lr": 0.0}, "train.outer_lr", "must be positive", "train.outer_lr=0.7"),
        ({"train__outer_lr": NAN}, "train.outer_lr", "must be positive", "train.outer_lr=0.7"),
        ({"train__outer_momentum": 1.0}, "train.outer_momentum", "in [0, 1)", "momentum=0.9"),
        (
            {"train__outer": "nesterov"},
            "train.outer",
            "has no effect with train.local_steps=1",
            "set train.local_steps=50",
        ),
        (
            {
                "train__local_steps": 4,
                "train__eval_interval": 6,
                "data__validation_fraction": 0.1,
            },
            "train.eval_interval",
            "the same weights only after every train.local_steps=4",
            "set train.eval_interval=8",
        ),
    ],
)
def test_compression_and_local_updates_are_checked(changes, key, rule, fix):
    problem = problems_of(**changes)[key]
    assert rule in problem.rule
    assert fix in problem.fix


def test_compression_or_local_updates_pass_the_door():
    config = read_config(
        small_config(parallel__gradient_compression="powersgd", parallel__powersgd_start_step=2)
    )
    assert config.parallel.gradient_compression is GradientCompression.powersgd
    changes = {"train__local_steps": 4, "train__local_after": 2, "train__outer": "nesterov"}
    assert read_config(small_config(**changes)).train.outer is Outer.nesterov


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


# small_config has 4 layers.
INTERLEAVED = {"parallel__schedule": "interleaved", "parallel__pp": 2}


@pytest.mark.parametrize(
    ("asked", "key", "rule", "fix"),
    [
        (
            {"parallel__schedule": "zb"},
            "parallel.schedule",
            "not one of the choices",
            "use one of one_f_one_b, gpipe, interleaved, zero_bubble",
        ),
        (
            {"parallel__virtual_stages": 0},
            "parallel.virtual_stages",
            "must be at least 1",
            "set parallel.virtual_stages=1 or more",
        ),
        (
            {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2},
            "parallel.schedule",
            "with parallel.pp=1 there is nothing to interleave",
            "set parallel.schedule=one_f_one_b and parallel.virtual_stages=1",
        ),
        (
            INTERLEAVED,
            "parallel.virtual_stages",
            "parallel.schedule=interleaved needs 2 or more stages on each rank",
            "set parallel.virtual_stages=2, or parallel.schedule=one_f_one_b",
        ),
        (
            {"parallel__pp": 2, "parallel__virtual_stages": 2},
            "parallel.virtual_stages",
            "parallel.schedule=one_f_one_b has one stage on each rank",
            "set parallel.virtual_stages=1, or parallel.schedule=interleaved",
        ),
        (
            INTERLEAVED | {"parallel__virtual_stages": 3},
            "parallel.virtual_stages",
            "with parallel.pp=2 makes 6 stages, more than model.num_layers=4",
            "set parallel.virtual_stages=2 or less",
        ),
        (
            INTERLEAVED | {"parallel__pp": 3, "parallel__virtual_stages": 2},
            "parallel.virtual_stages",
            "with parallel.pp=3 makes 6 stages, more than model.num_layers=4",
            "set parallel.virtual_stages=1 and parallel.schedule=one_f_one_b",
        ),
        (
            {"parallel__pp": 2, "parallel__stage_layers": [1, 1, 2]},
            "parallel.stage_layers",
            "3 numbers for parallel.pp=2 * parallel.virtual_stages=1 = 2 stages",
            "for example parallel.stage_layers=[2,2], or null",
        ),
        (
            {"parallel__pp": 3, "parallel__stage_layers": [1, 1, 1]},
            "parallel.stage_layers",
            "adds up to 3 layers, not to model.num_layers=4",
            "for example parallel.stage_layers=[2,1,1], or null",
        ),
        (
            {"parallel__pp": 2, "parallel__stage_layers": [4, 0]},
            "parallel.stage_layers",
            "numbers of layers, each at least 1",
            "for example parallel.stage_layers=[2,2], or null",
        ),
        (
            {"parallel__pp": 2, "parallel__stage_layers": [3, "1"]},
            "parallel.stage_layers",
            "numbers of layers, each at least 1",
            "for example parallel.stage_layers=[2,2], or null",
        ),
        (
            {"parallel__pp": 2, "parallel__stage_layers": [1, 3], "model__share_layers": 2},
            "parallel.stage_layers",
            "layers that share weights (model.share_layers=2) must be on one stage",
            "for example parallel.stage_layers=[2,2], or null",
        ),
        (
            {"parallel__pp": 4, "model__share_layers": 2},
            "model.share_layers",
            "makes 2 groups out of 4 layers, and layers that share weights must be on one stage: "
            "parallel.pp=4 * parallel.virtual_stages=1 = 4 stages are more",
            "use 2 stages or less, or set model.share_layers=1",
        ),
        (
            {"train__recompute_stages": ["full"], "train__recompute": "selective"},
            "train.recompute_stages",
            "excludes train.recompute=selective",
            "set train.recompute=none, or train.recompute_stages=null",
        ),
        (
            {"train__recompute_stages": ["sellective"]},
            "train.recompute_stages[0]",
            "not one of the choices",
            "use one of none, selective, full; did you mean selective?",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused_with_what_can(asked, key, rule, fix):
    found = problems_of(**asked)
    assert list(found) == [key]
    assert (found[key].rule, found[key].fix) == (rule, fix)


def test_a_zero_stage_that_the_trainer_does_not_have_is_refused():
    found = problems_of(parallel__zero=2)
    assert list(found) == ["parallel.zero"]
    assert "shards the optimizer's state alone" in found["parallel.zero"].rule
    assert "set train.engine=deepspeed, or parallel.zero=1" in found["parallel.zero"].fix


def test_the_optimizers_state_may_be_split_and_be_in_host_memory():
    config = read_config(small_config(parallel__zero=1, train__offload_optimizer=True))
    assert (config.parallel.zero, config.train.offload_optimizer) == (1, True)


@pytest.mark.parametrize(
    ("targets", "value", "rule", "fix"),
    [
        ([], "[]", "adapters without a place", "or set lora.rank=null"),
        (["gate"], "gate", "model.activation=gelu has no gate", "leave gate out"),
        (["quary"], "quary", "no such layer; did you mean query", "query, key, value"),
        (["up", "up"], "up", "named twice", "name it once"),
    ],
)
def test_adapters_have_a_place_in_the_model(targets, value, rule, fix):
    (problem,) = problems_of(lora__rank=4, lora__targets=targets).values()
    assert (problem.key, problem.value) == ("lora.targets", value)
    assert rule in problem.rule
    assert fix in problem.fix
    read_config(small_config(lora__targets=targets))  # without a rank there are none


@pytest.mark.parametrize("alpha", [0.0, -1.0, NAN, float("inf")])
def test_adapters_have_a_positive_scale(alpha):
    assert "must be positive" in problems_of(lora__rank=4, lora__alpha=alpha)["lora.alpha"].rule


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


def test_stages_that_fit_are_taken():
    sizes = [1, 1, 1, 1]
    parallel = read_config(
        small_config(**INTERLEAVED, parallel__virtual_stages=2, parallel__stage_layers=sizes)
    ).parallel
    assert parallel.schedule is Schedule.interleaved
    assert (parallel.virtual_stages, parallel.stage_layers) == (2, sizes)
