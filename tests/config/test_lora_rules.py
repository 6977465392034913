"""What adapters must fulfil."""

from __future__ import annotations

import pytest

from slurm_pt.config import read_config
from tests.builders import problems_of, small_config


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


@pytest.mark.parametrize("alpha", [0.0, -1.0])
def test_adapters_have_a_positive_scale(alpha):
    assert "must be positive" in problems_of(lora__rank=4, lora__alpha=alpha)["lora.alpha"].rule
