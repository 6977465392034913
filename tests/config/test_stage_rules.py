"""What stages must fulfil."""

from __future__ import annotations

import pytest

from slurm_pt.config import Schedule, read_config
from tests.builders import problems_of, small_config

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
            {"parallel__pp": 2000, "model__num_layers": 2000},
            "parallel.pp",
            "parallel.pp * parallel.virtual_stages is more than 1024 stages",
            "set fewer: their schedule is planned step by step",
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


def test_stages_that_fit_are_taken():
    sizes = [1, 1, 1, 1]
    parallel = read_config(
        small_config(**INTERLEAVED, parallel__virtual_stages=2, parallel__stage_layers=sizes)
    ).parallel
    assert parallel.schedule is Schedule.interleaved
    assert (parallel.virtual_stages, parallel.stage_layers) == (2, sizes)
