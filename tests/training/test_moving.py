"""A checkpoint does not know of stages: a run may go on with another schedule or pipeline."""

import pytest

from tests.ranks import run_ranks
from tests.training.moving import ANYWHERE, CONFIG, LAYOUTS, MODELS, SAVED_AT

pytestmark = pytest.mark.ranks


def is_same(curve, expected, *, rel):
    """Losses and gradient norms: AdamW hides gradients of a wrong scale from the losses."""
    assert len(curve) == len(expected)
    found = [number for step in curve for number in step]
    return found == pytest.approx([number for step in expected for number in step], rel=rel)


def test_a_run_goes_on_with_any_schedule_on_any_number_of_ranks(tokens, tmp_path):
    found, *others = run_ranks(4, "tests.training.moving:curves_after_moving", tmp_path, tokens)
    assert all(other == found for other in others)
    expected = found["1F1B on 2 ranks"]["whole"]
    assert len(expected) == CONFIG.steps
    for name in LAYOUTS:
        assert is_same(found[name]["whole"], expected, rel=1e-11), name
        for saved in LAYOUTS:
            assert is_same(found[name][saved], expected[SAVED_AT:], rel=1e-11), (name, saved)


def test_f56_what_tp2_pp2_dp2_saved_goes_on_in_every_other_layout(tmp_path, tokens):
    """Weights and moments: what follows is what follows in the run that was never moved."""
    first, *others = ANYWHERE
    (whole, *_) = run_ranks(8, "tests.training.moving:save_at", tmp_path, tokens, first)
    by_size: dict[int, list[str]] = {}
    for name in [first, *others]:
        (tp, pp, dp), _ = ANYWHERE[name]
        by_size.setdefault(tp * pp * dp, []).append(name)
    for world_size, names in by_size.items():
        (found, *_) = run_ranks(
            world_size, "tests.training.moving:go_on_at", tmp_path, tokens, names
        )
        for kind in MODELS:
            for name, curve in found[kind].items():
                assert is_same(curve, whole[kind][SAVED_AT:], rel=1e-9), (kind, name)
