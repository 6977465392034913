"""The one door from OmegaConf to checked values: every broken rule at once, each with a way out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slurm_pt.config.batch_rules import batch_problem
from slurm_pt.config.engine_rules import engine_rules
from slurm_pt.config.lora_rules import lora_rules
from slurm_pt.config.model_rules import model_rules
from slurm_pt.config.schema import MISSING, JobConfig, MixtureSource, RunConfig
from slurm_pt.config.slow_link_rules import slow_link_rules
from slurm_pt.config.slurm_values import parse_memory_mib, parse_time_limit_s, suggest_memory
from slurm_pt.config.stage_rules import stage_rules
from slurm_pt.errors import ConfigError, Problem, nearest

_C = TypeVar("_C")
_J = TypeVar("_J", bound=JobConfig)

SECTIONS_WITHOUT_INFLUENCE = ("slurm", "monitor", "checkpoint", "cluster", "run_root", "name")
"""Keys that do not change what a run computes, and so do not name its folder."""
KEYS_WITHOUT_INFLUENCE = (
    ("data", "prefetch"),
    ("train", "recompute"),
    ("train", "recompute_stages"),
    ("train", "offload_optimizer"),
    ("train", "offload_embedding"),
    ("train", "offload_parameters"),
    ("parallel", "zero"),
)
"""The same, within sections that do."""
LARGEST_LOSS_SCALE = 2.0**64
MOST_RANKS = 2**20
LONGEST_TIMEOUT_S = 10**8
"""About three years; torch counts in nanoseconds, in 63 bits."""
LONGEST_SIGNAL_LEAD_S = 65535
"""The largest number that sbatch takes in --signal."""


def read_config(cfg: DictConfig | Mapping[str, Any]) -> RunConfig:
    """The checked configuration of a run of our trainer. Raises ConfigError with all problems."""
    return _read(cfg, RunConfig)


def read_job_config(cfg: DictConfig | Mapping[str, Any]) -> JobConfig:
    """The checked job part of any configuration; sections of a user's own loop are let be."""
    plain = plain_config(cfg)
    names = {declared.name for declared in dataclasses.fields(JobConfig)}
    return _read({key: value for key, value in plain.items() if key in names}, JobConfig)


def signature(cfg: DictConfig | Mapping[str, Any]) -> str:
    """Ten hexadecimal digits that name what a run computes; the same config, the same digits."""
    plain = {k: v for k, v in plain_config(cfg).items() if k not in SECTIONS_WITHOUT_INFLUENCE}
    for section, key in KEYS_WITHOUT_INFLUENCE:
        if isinstance(plain.get(section), Mapping):
            plain[section] = {k: v for k, v in plain[section].items() if k != key}
    plain = {name: section for name, section in plain.items() if section != {}}
    text = json.dumps(_text_keys(plain), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _text_keys(value: Any) -> Any:
    """The value with every key as text: keys of different types cannot be sorted."""
    if isinstance(value, Mapping):
        return {str(key): _text_keys(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_text_keys(inner) for inner in value]
    return value


def plain_config(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as plain containers, interpolations resolved, without Hydra's own node."""
    if not isinstance(cfg, DictConfig):
        return {str(key): value for key, value in cfg.items() if key != "hydra"}
    plain: dict[str, Any] = {}
    for key in cfg:
        if key == "hydra":  # holds values that only a running Hydra program can resolve
            continue
        try:
            value = MISSING if OmegaConf.is_missing(cfg, key) else cfg[key]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, enum_to_str=True)
        except OmegaConfBaseException as error:
            full_key = getattr(error, "full_key", None) or str(key)
            text = str(error).splitlines()[0]
            fix = "name an existing key in the interpolation"
            raise ConfigError([Problem(full_key, "${...}", text, fix)]) from error
        plain[str(key)] = value.name if isinstance(value, Enum) else value
    return plain


def _read(cfg: DictConfig | Mapping[str, Any], cls: type[_J]) -> _J:
    problems: list[Problem] = []
    config = _build(plain_config(cfg), cls, "", problems)
    if problems:
        raise ConfigError(problems)
    problems = list(_broken_rules(config))
    if problems:
        raise ConfigError(problems)
    return config


def _build(values: Mapping[str, Any], cls: type[_C], prefix: str, problems: list[Problem]) -> _C:
    """An instance of a frozen dataclass; misspelt, missing and ill-typed values become problems."""
    hints = typing.get_type_hints(cls)
    declared = {f.name: f for f in dataclasses.fields(typing.cast("Any", cls))}
    problems += [
        Problem(
            f"{prefix}{key}",
            value,
            f"there is no such key{nearest(str(key), declared)}",
            f"use one of {', '.join(declared)}",
        )
        for key, value in values.items()
        if key not in declared
    ]
    arguments: dict[str, Any] = {}
    for name, hint in hints.items():
        if name not in declared:
            continue
        key, default = prefix + name, declared[name].default
        if dataclasses.is_dataclass(hint):
            section = values.get(name)
            if not isinstance(section, Mapping | None):
                problems.append(Problem(key, section, "a section of keys", f"set {key}.KEY=..."))
                section = None
            arguments[name] = _build(section or {}, typing.cast("type", hint), f"{key}.", problems)
        elif name in values:
            arguments[name] = _typed(key, values[name], hint, problems)
        elif default == MISSING:
            arguments[name] = _typed(key, MISSING, hint, problems)
    return cls(**arguments)


def _typed(key: str, value: Any, hint: Any, problems: list[Problem]) -> Any:
    """The value in the declared type, or as it is after reporting a problem."""
    if value == MISSING and isinstance(value, str):
        problems.append(Problem(key, value, "a value is required", f"set {key}=..."))
        return value
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for alternative in alternatives:
        origin = typing.get_origin(alternative) or alternative
        inner = typing.get_args(alternative)
        if origin is list and inner and dataclasses.is_dataclass(inner[0]):
            if isinstance(value, list):
                return _sections(key, value, typing.cast("type", inner[0]), problems)
        elif origin is list and inner and issubclass(inner[0], Enum):
            if isinstance(value, list):
                return [_typed(f"{key}[{n}]", v, inner[0], problems) for n, v in enumerate(value)]
        elif isinstance(origin, type) and issubclass(origin, Enum):
            if isinstance(value, str) and value in origin.__members__:
                return origin[value]
        elif origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                rule = "must be a finite number"
                problems.append(Problem(key, value, rule, "give a number, or leave it out"))
            return float(value)
        elif isinstance(value, origin) and (origin is bool or not isinstance(value, bool)):
            return value
        elif origin is str and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)  # YAML reads `mem: 64` as a number
    problems.append(_wrong_type(key, value, alternatives))
    return value


def _sections(key: str, values: list[Any], cls: type[_C], problems: list[Problem]) -> list[_C]:
    """Instances of a frozen dataclass from a list of sections."""
    built = []
    for place, section in enumerate(values):
        at = f"{key}[{place}]"
        if isinstance(section, Mapping):
            built.append(_build(section, cls, f"{at}.", problems))
        else:
            names = ", ".join(f.name for f in dataclasses.fields(typing.cast("Any", cls)))
            fix = f"give a section with the keys {names}"
            problems.append(Problem(at, section, "not a section of keys", fix))
    return built


def _wrong_type(key: str, value: Any, alternatives: tuple[Any, ...]) -> Problem:
    first = alternatives[0]
    if isinstance(first, type) and issubclass(first, Enum):
        names = ", ".join(first.__members__)
        rule, fix = (
            "not one of the choices",
            f"use one of {names}{nearest(str(value), [*first.__members__])}",
        )
    else:
        name = getattr(first, "__name__", str(first))
        rule, fix = f"must be of type {name}", f"give a value of type {name}"
    return Problem(key, value, rule, fix)


# ---------------------------------------------------------------------------------- the rules


def _broken_rules(config: JobConfig) -> typing.Iterator[Problem]:
    yield from _job_rules(config)
    yield from _slurm_rules(config)
    if isinstance(config, RunConfig):
        yield from _positive_rules(config)
        yield from model_rules(config)
        yield from stage_rules(config)
        yield from engine_rules(config)
        yield from slow_link_rules(config)
        yield from lora_rules(config)
        yield from _batch_rules(config)
        yield from _data_rules(config)


def _job_rules(config: JobConfig) -> typing.Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name):
        yield Problem(
            "name",
            config.name,
            "a run's name is part of file names: 1 to 100 letters, digits and . _ -, "
            "the first a letter or digit",
            "for example name=gpt",
        )
    for key, value in (
        ("parallel.tp", config.parallel.tp),
        ("parallel.pp", config.parallel.pp),
        ("parallel.dp", config.parallel.dp),
        ("parallel.virtual_stages", config.parallel.virtual_stages),
        ("slurm.nodes", config.slurm.nodes),
        ("slurm.cpus_per_task", config.slurm.cpus_per_task),
        ("slurm.array_parallelism", config.slurm.array_parallelism),
        ("checkpoint.keep_last", config.checkpoint.keep_last),
        ("cluster.ranks_per_node", config.cluster.ranks_per_node),
        ("cluster.start_timeout_s", config.cluster.start_timeout_s),
        ("cluster.collective_timeout_s", config.cluster.collective_timeout_s),
    ):
        if value is not None and value < 1:
            yield Problem(key, value, "must be at least 1", f"set {key}=1 or more")
    ranks = config.parallel.tp * config.parallel.pp * (config.parallel.dp or 1)
    if ranks > MOST_RANKS:
        rule = f"parallel.tp * parallel.pp * parallel.dp is more than {MOST_RANKS} ranks"
        yield Problem("parallel.dp", config.parallel.dp, rule, "set them to what the job has")
    if config.cluster.collective_timeout_s > LONGEST_TIMEOUT_S:
        key, rule = "cluster.collective_timeout_s", f"must be at most {LONGEST_TIMEOUT_S}"
        yield Problem(key, config.cluster.collective_timeout_s, rule, f"set {key}=1800")
    for key, seconds in (
        ("checkpoint.interval_s", config.checkpoint.interval_s),
        ("monitor.heartbeat_s", config.monitor.heartbeat_s),
        ("monitor.comment_s", config.monitor.comment_s),
        ("monitor.poll_s", config.monitor.poll_s),
        ("slurm.signal_lead_s", config.slurm.signal_lead_s),
        ("slurm.max_failures", config.slurm.max_failures),
    ):
        if not seconds >= 0:  # nor NaN
            yield Problem(key, seconds, "must not be negative", f"set {key}=0 or more")
    if config.slurm.signal_lead_s > LONGEST_SIGNAL_LEAD_S:
        rule = f"Slurm warns {LONGEST_SIGNAL_LEAD_S} s before the end at most"
        yield Problem("slurm.signal_lead_s", config.slurm.signal_lead_s, rule, "set it to 120")
    if config.cluster.device not in {"auto", "cpu", "cuda"}:
        yield Problem(
            "cluster.device", config.cluster.device, "unknown device", "use auto, cpu or cuda"
        )


_NAMES = (
    "partition",
    "qos",
    "account",
    "constraint",
    "reservation",
    "job_name",
    "nodelist",
    "exclude",
    "gres",
    "dependency",
)


def _slurm_rules(config: JobConfig) -> typing.Iterator[Problem]:
    slurm = config.slurm
    memory = {key: getattr(slurm, key) for key in ("mem", "mem_per_cpu", "mem_per_gpu")}
    written = {f"slurm.{key}": value for key, value in memory.items() if value is not None}
    for key, value in written.items():
        try:
            parse_memory_mib(value)
        except ValueError as error:
            yield Problem(key, repr(value), str(error), f"set {key}={suggest_memory(value)}")
    if len(written) > 1:
        names = " and ".join(written)
        yield Problem(
            next(iter(written)),
            next(iter(written.values())),
            f"{names} exclude each other in Slurm",
            "keep one of them and set the others to null",
        )
    if slurm.time is not None:
        try:
            parse_time_limit_s(slurm.time)
        except ValueError as error:
            fix = "set slurm.time=1-0 for a day, 2:00:00 for two hours, 90 for 90 minutes"
            yield Problem("slurm.time", repr(slurm.time), str(error), fix)
    for key in _NAMES:
        value = getattr(slurm, key)
        if value is not None and (value.strip() in {"", "None", "none"} or not value.isprintable()):
            yield Problem(f"slurm.{key}", repr(value), "not a name", f"leave slurm.{key} at null")
    ours = {f.name.replace("_", "-") for f in dataclasses.fields(slurm)} | {"array", "output"}
    ours |= {"error", "open-mode", "requeue", "no-requeue", "signal", "ntasks", "ntasks-per-node"}
    for option, value in slurm.additional_parameters.items():
        name, key = str(option).replace("_", "-"), f"slurm.additional_parameters.{option}"
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            fix = "use the long name without its dashes, such as mail-type"
            yield Problem(key, value, "not the name of a long sbatch option", fix)
        elif any(known.startswith(name) for known in ours):  # sbatch takes abbreviations
            rule = "this sbatch option is written from other keys"
            fix = f"use slurm.{name.replace('-', '_')} where it exists, or leave it to slurm_pt"
            yield Problem(key, value, rule, fix)
        if not str(value).isprintable():
            yield Problem(key, repr(value), "a #SBATCH line holds one line", "remove the line feed")


def _positive_rules(config: RunConfig) -> typing.Iterator[Problem]:
    model, train = config.model, config.train
    for key, value in (
        ("model.num_layers", model.num_layers),
        ("model.hidden_size", model.hidden_size),
        ("model.num_heads", model.num_heads),
        ("model.vocab_size", model.vocab_size),
        ("model.max_seq_len", model.max_seq_len),
        ("model.ffn_hidden_size", model.ffn_size),
        ("train.steps", train.steps),
        ("train.global_batch_size", train.global_batch_size),
        ("train.micro_batch_size", train.micro_batch_size),
        ("train.seq_len", train.seq_len),
        ("train.eval_batches", train.eval_batches),
        ("train.loss_scale", train.loss_scale),
        ("train.loss_scale_window", train.loss_scale_window),
        ("model.head_size", model.head_size),
        ("model.rope_original_seq_len", model.rope_original_seq_len),
    ):
        if value is not None and value < 1:
            yield Problem(key, value, "must be at least 1", f"set {key}=1 or more")
    if train.loss_scale > LARGEST_LOSS_SCALE:
        rule = f"above {LARGEST_LOSS_SCALE:g} no loss is finite"
        yield Problem("train.loss_scale", train.loss_scale, rule, "set train.loss_scale=65536")
    for key, number in (("train.lr", train.lr), ("train.eps", train.eps)):
        if not number > 0:
            yield Problem(key, number, "must be positive", f"set {key} above 0")
    if train.min_lr > train.lr:
        fix = f"set train.min_lr={train.lr:g} or less"
        yield Problem("train.min_lr", train.min_lr, f"above train.lr={train.lr:g}", fix)
    if not 0 <= model.dropout < 1:
        yield Problem("model.dropout", model.dropout, "must be in [0, 1)", "set model.dropout=0.1")
    for key, number in (("train.beta1", train.beta1), ("train.beta2", train.beta2)):
        if not 0 <= number < 1:
            yield Problem(key, number, "must be in [0, 1)", f"set {key}=0.9, or leave it out")
    for key, number in (
        ("train.min_lr", train.min_lr),
        ("train.warmup_steps", train.warmup_steps),
        ("train.weight_decay", train.weight_decay),
        ("model.init_std", model.init_std),
    ):
        if not number >= 0:
            yield Problem(key, number, "must not be negative", f"set {key}=0 or more")
    if train.grad_clip is not None and not train.grad_clip > 0:
        fix = "set train.grad_clip=1.0, or null for none"
        yield Problem("train.grad_clip", train.grad_clip, "must be positive", fix)


def _batch_rules(config: RunConfig) -> typing.Iterator[Problem]:
    train, dp = config.train, config.parallel.dp or 1
    if min(train.global_batch_size, train.micro_batch_size, dp) < 1:
        return
    problem = batch_problem(train, dp)
    if problem is not None:
        yield problem


def _data_rules(config: RunConfig) -> typing.Iterator[Problem]:
    data, interval = config.data, config.train.eval_interval
    if data.prefetch < 0:
        rule = "must not be negative"
        yield Problem("data.prefetch", data.prefetch, rule, "set data.prefetch=0 or more")
    fraction = data.validation_fraction
    if not 0 <= fraction < 1:
        fix = "set data.validation_fraction=0.01, or 0 for none"
        yield Problem("data.validation_fraction", fraction, "must be in [0, 1)", fix)
    if interval is not None and interval < 1:
        fix = "set train.eval_interval=1 or more, or null for never"
        yield Problem("train.eval_interval", interval, "must be at least 1", fix)
    elif interval is not None and fraction == 0:
        rule = "needs tokens that are held out, but data.validation_fraction=0"
        fix = "set data.validation_fraction=0.01, or train.eval_interval=null"
        yield Problem("train.eval_interval", interval, rule, fix)
    if data.mixture is not None:
        yield from _mixture_rules(data.path, data.mixture)


def _mixture_rules(path: str | None, mixture: list[MixtureSource]) -> typing.Iterator[Problem]:
    if path is not None:
        rule = "data.path and data.mixture exclude each other"
        yield Problem("data.path", path, rule, "set one of the two to null")
    if not mixture:
        fix = "name a source and its weight, or set data.mixture=null"
        yield Problem("data.mixture", "[]", "an empty mixture", fix)
    for place, source in enumerate(mixture):
        key = f"data.mixture[{place}]"
        if not source.weight > 0:
            fix = "set it above 0, or leave the source out"
            yield Problem(f"{key}.weight", source.weight, "must be positive", fix)
        if source.path in [other.path for other in mixture[:place]]:
            fix = "name it once, with the sum of the weights"
            yield Problem(f"{key}.path", source.path, "is in the mixture already", fix)
