"""Local updates equal the algorithms written plainly, and survive a stop; so does compression."""

import pytest
import torch

from tests.ranks import run_ranks
from tests.training.local_cases import LAYOUTS

pytestmark = pytest.mark.ranks

CASES = "tests.training.local_cases"
WAYS = ["post-local SGD", "DiLoCo", "DiLoCo of adapters"]


@pytest.fixture(scope="module")
def plain(tokens):
    (found,) = run_ranks(1, f"{CASES}:plain_curves", tokens)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four_ranks(tokens, folder):
    return run_ranks(4, f"{CASES}:on_four", tokens, folder)


@pytest.fixture(scope="module")
def two_ranks(four_ranks, tokens, folder):
    return run_ranks(2, f"{CASES}:on_two", tokens, folder)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "tp{} pp{} dp{}".format(*layout))
@pytest.mark.parametrize("way", WAYS)
def test_every_layout_gives_the_curve_of_the_algorithm(plain, four_ranks, layout, way):
    found = [rank["curves"][layout][way][0] for rank in four_ranks]
    assert all(curve == found[0] for curve in found)
    (losses, norms), (expected_losses, expected_norms) = found[0], plain[layout[2]][way]
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    assert norms == pytest.approx(expected_norms, rel=1e-9)
    # Beside a head of random numbers that stays as it is, adapters learn little.
    assert losses[-1] < (0.99 if way == "DiLoCo of adapters" else 0.9) * losses[0]


@pytest.mark.parametrize("way", WAYS)
def test_replicas_have_the_same_weights_at_the_end(four_ranks, way):
    weights = [{rank["curves"][layout][way][1] for rank in four_ranks} for layout in LAYOUTS]
    # With tp2 or pp2 the ranks of a replica hold different parts, those of two replicas the same.
    assert [len(parts) for parts in weights] == [1, 2, 2]


def test_the_ways_and_numbers_of_replicas_differ(plain):
    ends = [round(losses[-1], 6) for ways in plain.values() for losses, _ in ways.values()]
    assert len(set(ends)) == 2 * len(WAYS)


def test_a_resumed_run_equals_the_whole_one_bit_for_bit(four_ranks, two_ranks):
    for rank in (*four_ranks, *two_ranks):
        assert set(rank["resumed"]) == {*WAYS, "PowerSGD"}
        for way, found in rank["resumed"].items():
            assert found == dict.fromkeys(found, True), way


def test_another_number_of_replicas_begins_with_the_mean(four_ranks, two_ranks):
    means = four_ranks[0]["saved"]["means"]
    for rank in two_ranks:
        resumed, own, (agreed_is_own, has_momentum) = rank["loaded"]
        assert resumed == (7, "mean")
        assert own.keys() == means.keys()
        for name, tensor in own.items():
            assert torch.allclose(tensor, means[name], rtol=1e-12, atol=1e-15), name
        assert not agreed_is_own  # two updates after the last synchronisation
        assert has_momentum


def test_what_ranks_have_of_their_own_does_not_fit_another_split(four_ranks):
    assert all(rank["saved"]["split"] == (7, "dropped") for rank in four_ranks)


def test_errors_of_compressed_gradients_are_not_taken_for_those_of_other_layers(four_ranks):
    assert all(rank["saved"]["errors"] == (7, "dropped") for rank in four_ranks)


def test_what_is_not_compressed_is_as_ever(two_ranks):
    for rank in two_ranks:
        assert rank["uncompressed"] == dict.fromkeys(rank["uncompressed"], True)
