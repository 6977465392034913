"""Held-out tokens are looked at when asked for, give one number in every layout, and can wait."""

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def test_every_layout_gives_the_losses_of_one_process_without_dropout_in_the_evaluation(tokens):
    (alone,) = run_ranks(1, "tests.training.evaluation_cases:evaluations", tokens, [(1, 1, 1)])
    layouts = [(2, 2, 1), (1, 2, 2), (2, 1, 2)]
    ranks = run_ranks(4, "tests.training.evaluation_cases:evaluations", tokens, layouts)
    expected = alone[0]
    # Every second step, and the last one whatever its number.
    assert [step for step, _, held_out in expected if held_out is not None] == [2, 4, 5]
    for rank in ranks:
        for found in rank:
            assert [step for step, _, _ in found] == [1, 2, 3, 4, 5]
            for (_, loss, held_out), (_, other_loss, other) in zip(found, expected, strict=True):
                assert loss == pytest.approx(other_loss, rel=1e-9)
                assert held_out == (None if other is None else pytest.approx(other, rel=1e-9))


def test_a_wish_to_stop_ends_an_evaluation_on_all_ranks_and_the_step_counts(tokens):
    ranks = run_ranks(2, "tests.training.evaluation_cases:stopped_while_evaluating", tokens)
    assert ranks == [(2, True, [None, None])] * 2
