import pytest

from benchmarks.comparison import disagreement
from benchmarks.parallel import TOLERANCE
from benchmarks.ranks import run_trial
from benchmarks.trial import MODELS, Layout, Trial
from tests.ranks import RankFailedError

pytestmark = pytest.mark.ranks


def tiny(contestant: str, layout: Layout, *, micro_batch_size: int = 2) -> Trial:
    return Trial(contestant, layout, MODELS["tiny"], 8, micro_batch_size, warmup=1, steps=1)


def test_ours_and_ddp_train_the_same_model_and_are_timed():
    ours = run_trial(tiny("ours", Layout(dp=2)))
    ddp = run_trial(tiny("ddp", Layout(dp=2)))
    assert len(ours.losses) == len(ddp.losses) == 2
    assert disagreement(ours.losses, ddp.losses) <= TOLERANCE
    assert ours.step_s > 0.0
    assert ddp.step_s > 0.0


def test_a_rank_that_raises_is_told_with_its_traceback():
    with pytest.raises(RankFailedError, match="ConfigError"):  # 8 sequences, micro-batches of 5
        run_trial(tiny("ours", Layout(dp=2), micro_batch_size=5))
