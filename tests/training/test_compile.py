"""Compiled parts give what they gave before."""

import pytest
import torch

from slurm_pt.errors import ConfigError
from slurm_pt.training.compiled import compile_between_products
from slurm_pt.training.layers import Activate
from tests.ranks import run_ranks


@pytest.mark.ranks
def test_compiled_runs_give_the_curve_of_one_that_is_not(tokens):
    ranks = run_ranks(2, "tests.training.compile_cases:curves", tokens)
    for curves in ranks:
        for name, (compiled, plain) in curves.items():
            assert compiled == pytest.approx(plain, rel=1e-9), name


def test_a_node_without_a_compiler_is_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*slurm.setup"):
        compile_between_products(Activate(gated=False), torch.device("cpu"))
