"""Every layout trains the same model: losses and gradient norms equal those of one process."""

import pytest

from tests.ranks import run_ranks
from tests.training.cases import PIPELINES, TRAIN, VARIANTS

pytestmark = pytest.mark.ranks

FOUR = {
    (4, 1, 1): ["tied", "float32", "llama", "llama, split sequence"],
    (1, 4, 1): ["tied", "untied", "float32", "few micro-batches", "zero_bubble"],
    (1, 1, 4): ["tied", "float32"],
}
EIGHT = {(2, 2, 2): [*VARIANTS, *PIPELINES]}


@pytest.fixture(scope="module")
def alone(tokens):
    (found,) = run_ranks(1, "tests.training.cases:curves", tokens, {(1, 1, 1): list(VARIANTS)})
    return found[1, 1, 1]


@pytest.fixture(scope="module")
def four_ranks(tokens):
    return run_ranks(4, "tests.training.cases:curves", tokens, FOUR, deadline_s=1800.0)


@pytest.fixture(scope="module")
def eight_ranks(tokens):
    return run_ranks(8, "tests.training.cases:curves", tokens, EIGHT, deadline_s=1800.0)


def check(ranks, layout, variant, alone):
    """All ranks know the same curve, and it is that of one process."""
    losses, norms = ranks[0][layout][variant]
    assert all(rank[layout][variant] == (losses, norms) for rank in ranks)
    assert len(losses) == TRAIN.steps
    expected_losses, expected_norms = alone["tied" if variant in PIPELINES else variant]
    if variant == "float32":
        assert losses[:10] == pytest.approx(expected_losses[:10], rel=1e-5)
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        assert norms[:10] == pytest.approx(expected_norms[:10], rel=1e-4)
    else:
        assert losses == pytest.approx(expected_losses, rel=1e-9)
        assert norms == pytest.approx(expected_norms, rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "variant"), [(layout, name) for layout, names in FOUR.items() for name in names]
)
def test_four_ranks_give_the_curve_of_one(four_ranks, layout, variant, alone):
    check(four_ranks, layout, variant, alone)


@pytest.mark.parametrize("variant", [*VARIANTS, *PIPELINES])
def test_tp2_pp2_dp2_gives_the_curve_of_one(eight_ranks, variant, alone):
    check(eight_ranks, (2, 2, 2), variant, alone)


def test_the_reference_runs_learn_clip_and_differ(alone):
    for losses, norms in alone.values():
        assert losses[-1] < 0.7 * losses[0]
        assert max(norms) > TRAIN.grad_clip  # clipping is part of what is compared
    first_losses = [round(losses[0], 6) for losses, _ in alone.values()]
    # Untied, dropout, llama and tied differ; float32, the size of micro-batches and a split
    # sequence change only digits.
    assert len(set(first_losses)) == 4


def test_initial_weights_do_not_depend_on_the_layout():
    (alone,) = run_ranks(1, "tests.training.cases:full_parameters", [(1, 1, 1)])
    layouts = [(2, 2, 1), (4, 1, 1), (1, 4, 1)]
    ranks = run_ranks(4, "tests.training.cases:full_parameters", layouts)
    for index in range(len(layouts)):
        merged = {}
        for rank in ranks:
            for name, digest in rank[index].items():
                assert merged.setdefault(name, digest) == digest
        assert merged == alone[0]
