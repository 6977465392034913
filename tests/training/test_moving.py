"""A checkpoint does not know of stages: a run may go on with another schedule or pipeline."""

import pytest

from tests.ranks import run_ranks
from tests.training.moving import CONFIG, LAYOUTS, SAVED_AT

pytestmark = pytest.mark.ranks


def test_a_run_goes_on_with_any_schedule_on_any_number_of_ranks(tokens, tmp_path):
    found, *others = run_ranks(4, "tests.training.moving:losses_after_moving", tmp_path, tokens)
    assert all(other == found for other in others)
    expected = found["1F1B on 2 ranks"]["whole"]
    assert len(expected) == CONFIG.steps
    for name in LAYOUTS:
        assert found[name]["whole"] == pytest.approx(expected, rel=1e-11), name
        for saved in LAYOUTS:
            assert found[name][saved] == pytest.approx(expected[SAVED_AT:], rel=1e-11), (
                name,
                saved,
            )
