"""Bytes counted at the process groups equal those of the formulas, for every dimension."""

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

POWERSGD = {"gradient_compression": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 0}
CASES = [
    pytest.param(8, (2, 2, 2), "tied", {}, id="tp2 pp2 dp2"),
    pytest.param(8, (2, 2, 2), "tied", {"sequence": True}, id="tp2 pp2 dp2, split sequence"),
    pytest.param(4, (4, 1, 1), "one key head", {}, id="tp4, one key head"),
    pytest.param(4, (4, 1, 1), "one key head", {"sequence": True}, id="the same, split sequence"),
    pytest.param(
        4, (1, 4, 1), "tied", {"schedule": "interleaved", "virtual_stages": 2}, id="interleaved"
    ),
    pytest.param(4, (1, 2, 2), "tied", {"schedule": "zero_bubble"}, id="zero bubble"),
    pytest.param(
        8, (2, 2, 2), "tied", {"sequence": True, "zero": 1}, id="tp2 pp2 dp2, split sequence, ZeRO"
    ),
    pytest.param(4, (2, 1, 2), "one key head", {"zero": 1}, id="tp2 dp2, one key head, ZeRO"),
    pytest.param(2, (1, 1, 2), "tied", {"gradient_compression": "bf16"}, id="bf16"),
    pytest.param(4, (2, 1, 2), "tied", POWERSGD, id="PowerSGD"),
    pytest.param(4, (1, 2, 2), "tied", {"local_steps": 3}, id="local updates"),
]


@pytest.mark.parametrize(("world_size", "layout", "model", "parallel"), CASES)
def test_a_step_sends_what_the_formulas_say(tokens, world_size, layout, model, parallel):
    settings = {"schedule": "one_f_one_b", **parallel}
    ranks = run_ranks(
        world_size,
        "tests.training.traffic_cases:counted_and_planned",
        *(tokens, layout, model, settings),
    )
    for rank, found in enumerate(ranks):
        for purpose, (counted, planned) in found.items():
            assert counted == pytest.approx(planned, rel=1e-12), f"rank {rank}: {purpose}"
    used = {purpose for purpose, (counted, _) in ranks[0].items() if counted}
    tp, pp, dp = layout
    for purpose, expected in (("tensor", tp > 1), ("pipeline", pp > 1), ("data", dp > 1)):
        assert (purpose in used) == expected
