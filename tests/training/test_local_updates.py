"""Local updates equal the algorithms written plainly, and survive a stop; so does compression."""

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

CASES = "tests.training.local_cases"
LAYOUTS = [(1, 1, 4), (2, 1, 2), (1, 2, 2)]
WAYS = ["post-local SGD", "DiLoCo"]


@pytest.fixture(scope="module")
def plain(tokens):
    (found,) = run_ranks(1, f"{CASES}:plain_curves", tokens)
    return found


@pytest.fixture(scope="module")
def four_ranks(tokens):
    return run_ranks(4, f"{CASES}:curves", tokens, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "tp{} pp{} dp{}".format(*layout))
@pytest.mark.parametrize("way", WAYS)
def test_every_layout_gives_the_curve_of_the_algorithm(plain, four_ranks, layout, way):
    losses, norms = four_ranks[0][layout][way][0]
    assert all(rank[layout][way][0] == (losses, norms) for rank in four_ranks)
    expected_losses, expected_norms = plain[layout[2]][way]
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    assert norms == pytest.approx(expected_norms, rel=1e-9)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("way", WAYS)
def test_replicas_have_the_same_weights_at_the_end(four_ranks, way):
    assert len({rank[1, 1, 4][way][1] for rank in four_ranks}) == 1
    # With tp2 or pp2 the ranks of a replica hold different parts, those of two replicas the same.
    for layout in ((2, 1, 2), (1, 2, 2)):
        assert len({rank[layout][way][1] for rank in four_ranks}) == 2


def test_the_two_ways_and_numbers_of_replicas_differ(plain):
    ends = [round(losses[-1], 6) for ways in plain.values() for losses, _ in ways.values()]
    assert len(set(ends)) == 4


@pytest.mark.parametrize(
    ("layout", "save_at"),
    [pytest.param((1, 1, 2), 7, id="dp2"), pytest.param((2, 2, 2), 10, id="tp2 pp2 dp2")],
)
def test_a_resumed_run_equals_the_whole_one_bit_for_bit(tokens, tmp_path, layout, save_at):
    world_size = layout[0] * layout[1] * layout[2]
    for rank in run_ranks(world_size, f"{CASES}:resumes", tokens, tmp_path, layout, save_at):
        for way, found in rank.items():
            assert found == dict.fromkeys(found, True), way


def test_another_number_of_replicas_begins_with_the_mean(tokens, tmp_path):
    four = run_ranks(4, f"{CASES}:moves", tokens, tmp_path)
    assert all(rank["other split"] == (7, "dropped") for rank in four)
    expected = four[0]["expected"]
    for resumed, own, (agreed_is_own, has_momentum) in run_ranks(
        2, f"{CASES}:loaded_by_two", tmp_path
    ):
        assert resumed == (7, "mean")
        assert own.keys() == expected.keys()
        for name, tensor in own.items():
            assert torch.allclose(tensor, expected[name], rtol=1e-12, atol=1e-15), name
        assert not agreed_is_own  # two updates after the last synchronisation
        assert has_momentum


def test_what_is_not_compressed_is_as_ever(tokens):
    for found in run_ranks(2, f"{CASES}:uncompressed", tokens):
        assert found == dict.fromkeys(found, True)
