"""16-bit activations: the loss scale, overflows that all ranks agree on, and the same training."""

from dataclasses import replace

import pytest

from slurm_pt.config.choices import DType
from slurm_pt.config.schema import TrainConfig
from slurm_pt.training.loss_scale import LossScale
from tests.ranks import run_ranks

CONFIG = TrainConfig(steps=1, global_batch_size=1, seq_len=1, loss_scale=8.0, loss_scale_window=2)


def test_the_scale_halves_at_an_overflow_and_doubles_after_a_window_without():
    scale = LossScale.of(replace(CONFIG, dtype=DType.float16))
    factors = []
    for overflow in (True, False, False, False, True, False, False):
        scale.note(overflow=overflow)
        factors.append(scale.factor)
    # 8 -> 4, two good ones: 8, one good one, an overflow: 4, two good ones: 8.
    assert factors == [4.0, 4.0, 8.0, 8.0, 4.0, 4.0, 8.0]
    for _ in range(10):
        scale.note(overflow=True)
    assert scale.factor == 1.0


def test_other_formats_have_no_scale():
    scale = LossScale.of(replace(CONFIG, dtype=DType.bfloat16))
    scale.note(overflow=True)
    scale.load({"factor": 4.0, "good_steps": 1})
    assert (scale.factor, scale.is_dynamic) == (1.0, False)


def test_f58_the_scale_goes_on_from_a_checkpoint():
    saved = LossScale(16.0, window=5)
    saved.note(overflow=False)
    resumed = LossScale(2.0, window=5)
    resumed.load(saved.state())
    assert (resumed.factor, resumed.good_steps) == (16.0, 1)
    resumed.load(None)
    assert resumed.factor == 16.0


@pytest.mark.ranks
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_the_scale_recovers(tokens):
    ranks = run_ranks(8, "tests.training.precision_cases:overflow", tokens, (2, 2, 2))
    for skipped, scales, weights, last in ranks:
        assert skipped == [None, None, True, None, None, None, None]
        # Halved by the third step, doubled by the sixth: three good ones in a row.
        assert scales == [1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0]
        assert last == 1024.0
        assert weights[2] == weights[1]
        assert len(set(weights)) == 6


@pytest.mark.ranks
def test_a_gradient_that_is_not_finite_ends_the_run_on_all_ranks_before_it_does_harm(tokens):
    ranks = run_ranks(2, "tests.training.precision_cases:diverges", tokens)
    assert len(set(ranks)) == 1
    assert "the gradient norm is nan" in ranks[0]  # infinity times 0 on the rank that counts
    assert "train.lr" in ranks[0]


@pytest.mark.ranks
def test_16_bit_formats_end_within_the_spread_of_seeds(tokens):
    (found, *_) = run_ranks(4, "tests.training.precision_cases:last_losses", tokens, (2, 2, 1))
    seeds = [loss for name, loss in found.items() if name.startswith("float32")]
    middle, spread = seeds[0], max(seeds) - min(seeds)
    assert spread > 0
    for name in ("bfloat16", "float16"):
        assert abs(found[name] - middle) <= spread, found
