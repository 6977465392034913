"""What compressed gradients and local updates must fulfil."""

from __future__ import annotations

import pytest

from slurm_pt.config import read_config
from slurm_pt.config.choices import GradientCompression, Outer
from tests.builders import problems_of, small_config


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
