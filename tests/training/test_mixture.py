import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt.training.mixture import MixtureOrder

BOUND = 1.68
"""Half the sum of the reciprocals of Fibonacci's numbers (3.3599), as the module derives."""
WEIGHTS = st.lists(
    st.floats(1e-3, 1e3) | st.sampled_from([1.0, 1.0, 2.0, 1e-6]), min_size=1, max_size=40
)


@given(weights=WEIGHTS)
def test_after_every_sample_each_source_has_given_its_share_to_within_the_bound(weights):
    number = 3000
    sources, _ = MixtureOrder(weights)(np.arange(number))
    given_so_far = np.cumsum(sources[:, np.newaxis] == np.arange(len(weights)), axis=0)
    shares = np.array(weights) / np.sum(weights)
    wanted = np.arange(1, number + 1)[:, np.newaxis] * shares
    assert np.abs(given_so_far - wanted).max() < BOUND + number / 1e9 * len(weights)


@given(count=st.integers(2, 25))
def test_the_bound_holds_for_weights_that_make_the_deepest_tree(count):
    fibonacci = [1, 1]
    while len(fibonacci) < count:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    sources, _ = MixtureOrder(fibonacci)(np.arange(3000))
    given_so_far = np.cumsum(sources[:, np.newaxis] == np.arange(count), axis=0)
    wanted = np.arange(1, 3001)[:, np.newaxis] * (np.array(fibonacci) / sum(fibonacci))
    assert np.abs(given_so_far - wanted).max() < BOUND


@given(weights=WEIGHTS)
def test_each_source_counts_its_own_samples_without_a_gap(weights):
    sources, own = MixtureOrder(weights)(np.arange(2000))
    for source in range(len(weights)):
        mine = own[sources == source]
        assert mine.tolist() == list(range(mine.size))


@given(weights=WEIGHTS, start=st.integers(0, 2**50), data=st.data())
def test_any_part_at_any_place_agrees_with_the_counts_up_to_it(weights, start, data):
    order = MixtureOrder(weights)
    sources, own = order(np.arange(start, start + 100))
    counts = order.counts(start)
    assert sum(counts) == start
    for source in range(len(weights)):
        mine = own[sources == source]
        assert mine.tolist() == list(range(counts[source], counts[source] + mine.size))
    part = data.draw(st.lists(st.integers(0, 99), max_size=8))
    again = order(np.array(part, dtype=np.int64) + start)
    assert (again[0] == sources[part]).all()
    assert (again[1] == own[part]).all()


def test_known_orders():
    # Two equal sources: round(m / 2), halves up, is 0 1 1 2 2 3: the left gets samples 0, 2, 4.
    assert MixtureOrder([1, 1])(np.arange(6))[0].tolist() == [0, 1, 0, 1, 0, 1]
    # 3 : 1. The lighter is the left: round(m / 4) is 0 0 1 1 1 1 2 2 2 for m = 0 .. 8.
    assert MixtureOrder([3, 1])(np.arange(8))[0].tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert MixtureOrder([3, 1])(np.arange(8))[1].tolist() == [0, 0, 1, 2, 3, 1, 4, 5]


def test_a_source_of_next_to_no_weight_is_still_a_source():
    assert MixtureOrder([1.0, 1e-30]).counts(2**33)[1] == 4  # one in 2**31


def test_a_late_step_does_not_take_the_steps_before_it():
    # Nobody walks 2**60 samples. 0.5 and 0.25 of them are whole numbers.
    sources, own = MixtureOrder([2, 1, 1])(np.arange(2**60, 2**60 + 4))
    assert sorted(sources.tolist()) == [0, 0, 1, 2]
    assert own[sources == 0].tolist() == [2**59, 2**59 + 1]
    assert own[sources == 1].tolist() == [2**58]


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")]])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="weights must be positive"):
        MixtureOrder(weights)
