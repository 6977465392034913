"""A user's own module, split by a plan, trains as the whole one does in plain PyTorch."""

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

TWO = {
    (2, 1, 1): ["plain", "tied", "grouped", "from meta", "sequence", "sequence first"],
    (1, 1, 2): ["other micro-batches"],
    (1, 2, 1): ["plain", "tied", "zero_bubble", "interleaved", "uneven", "from meta"],
}
EIGHT = {(2, 2, 2): ["plain", "tied, sequence", "sequence first", "zero_bubble", "from meta"]}
WHOLE = {name: name for name in ("plain", "tied", "grouped", "sequence first")}
WHOLE["tied, sequence"] = "tied"
"""The models that differ when they are whole."""


@pytest.fixture(scope="module")
def alone():
    names = sorted(set(WHOLE.values()))
    (found,) = run_ranks(1, "tests.parallel.split_cases:reference", names)
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, "tests.parallel.split_cases:curves", TWO)


@pytest.fixture(scope="module")
def eight_ranks():
    return run_ranks(8, "tests.parallel.split_cases:curves", EIGHT)


def check(ranks, layout, variant, alone):
    """All ranks know the same losses and norms, and they are those of the whole model."""
    losses, norms = ranks[0][layout, variant]
    assert all(rank[layout, variant] == (losses, norms) for rank in ranks)
    expected_losses, expected_norms = alone[WHOLE.get(variant, "plain")]
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    assert norms == pytest.approx(expected_norms, rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "variant"), [(layout, name) for layout, names in TWO.items() for name in names]
)
def test_two_ranks_train_as_the_whole_model_does(two_ranks, layout, variant, alone):
    check(two_ranks, layout, variant, alone)


@pytest.mark.parametrize("variant", EIGHT[2, 2, 2])
def test_tp2_pp2_dp2_train_as_the_whole_model_does(eight_ranks, variant, alone):
    check(eight_ranks, (2, 2, 2), variant, alone)


def test_the_whole_models_differ_and_clipping_is_part_of_what_is_compared(alone):
    assert len({round(losses[0], 9) for losses, _ in alone.values()}) == len(alone)
    assert all(max(norms) > 0.5 for _, norms in alone.values())


def test_a_checkpoint_goes_on_in_any_layout(tmp_path, alone):
    layouts = [(2, 2, 1), (1, 4, 1), (4, 1, 1), (2, 1, 2)]
    ranks = run_ranks(4, "tests.parallel.split_cases:moves", tmp_path, layouts)
    losses, norms = alone["tied"]
    for found_losses, found_norms in ranks[0]:
        assert found_losses == pytest.approx(losses[2:], rel=1e-9)
        assert found_norms == pytest.approx(norms[2:], rel=1e-9)


def test_odd_models_and_early_saves(tmp_path):
    for rank in run_ranks(2, "tests.parallel.split_cases:odd_models", tmp_path):
        assert rank == dict.fromkeys(rank, True)


def test_models_of_hugging_face_are_split_by_a_few_lines():
    for rank in run_ranks(2, "tests.parallel.split_cases:hugging_face_curves", 2):
        for (losses, norms), (split_losses, split_norms) in rank.values():
            assert split_losses == pytest.approx(losses, rel=1e-9)
            assert split_norms == pytest.approx(norms, rel=1e-9)
