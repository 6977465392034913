"""Saving and resuming by several ranks over gloo."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

CASES = "tests.checkpoint.cases"
FOUR_RANKS = [(2, 2, 1), (4, 1, 1), (1, 2, 2), (1, 1, 4), (2, 1, 2), (1, 4, 1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of step 7: of one rank, of six layouts of four ranks, and of 2 x 2 x 2."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, f"{CASES}:save_layouts", folder, [(1, 1, 1)])
    run_ranks(4, f"{CASES}:save_layouts", folder, FOUR_RANKS)
    run_ranks(8, f"{CASES}:save_layouts", folder, [(2, 2, 2)])
    return folder


ALL = [(1, 1, 1), *FOUR_RANKS, (2, 2, 2)]


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        pytest.param(1, [(1, 1, 1)], id="one rank"),
        pytest.param(2, [(2, 1, 1), (1, 2, 1), (1, 1, 2)], id="two ranks"),
        pytest.param(4, FOUR_RANKS, id="four ranks"),
        pytest.param(8, [(2, 2, 2), (4, 1, 2)], id="eight ranks"),
    ],
)
def test_a_checkpoint_of_any_layout_loads_bit_equal_into_any_other(saved, world_size, layouts):
    """F55, F56, F58: weights and optimizer moments, each element recognisable."""
    loads = run_ranks(world_size, f"{CASES}:load_layouts", saved, ALL, layouts)
    assert loads == [8 * len(layouts)] * world_size


def test_each_rank_gets_its_own_random_state_back(tmp_path):
    """F54: TP=2 x DP=2, python, numpy and torch."""
    drawn = run_ranks(4, f"{CASES}:random_state_of_each_rank", tmp_path)
    assert len({tuple(numbers) for numbers in drawn}) == 4


def test_all_ranks_skip_a_damaged_step_together_and_say_why(tmp_path):
    """F47: file, found and expected checksum, and what was used instead; F45: none usable stops."""
    (reason,) = run_ranks(4, f"{CASES}:fall_back_together", tmp_path)[0]
    assert reason.startswith("step_00000002: rank_00003.safetensors has sha256 ")
    assert ", expected " in reason
    assert reason.endswith("used instead: step_00000001")


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_keeps_the_old_checkpoint(tmp_path):
    told = run_ranks(4, f"{CASES}:full_disk_on_one_rank", tmp_path, deadline_s=60)
    assert len(set(told)) == 1
    assert "rank 2" in told[0]


def test_a_rank_that_never_enters_the_save_is_named_within_the_time_limit(tmp_path):
    """F48."""
    (waited, told), _, (also_waited, _) = run_ranks(3, f"{CASES}:a_rank_that_never_comes", tmp_path)
    assert "1" in told.partition("says:")[2]
    assert "save(step=1)" in told
    assert max(waited, also_waited) < 3.0


def test_ranks_that_save_different_steps_are_told_which(tmp_path):
    """F48: the decision was not made once for all."""
    assert "{0: 5, 1: 6}" in run_ranks(2, f"{CASES}:ranks_save_different_steps", tmp_path)[0]


def test_a_save_is_not_committed_when_another_job_owns_the_run_by_then(tmp_path):
    run_ranks(2, f"{CASES}:another_job_owns_the_run", tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_name_expected_and_found(tmp_path):
    """F58; and the tensors are left as they were."""
    told = run_ranks(2, f"{CASES}:tensors_that_do_not_fit", tmp_path)[0]
    name = "optimizer.exp_avg.layers.1.up.weight"
    assert f"{name}: expected shape (24, 7), found (24, 6)" in told["shape"]
    assert f"{name}: expected torch.bfloat16, found torch.float32" in told["format"]
    assert "new.weight: expected shape (3,), found nothing" in told["missing"]
    assert f"{name}: expected nothing, found it" in told["extra"]
    assert f"{name}: expected split along dim 1, found split along (0,)" in told["placement"]


def test_tensors_that_only_some_ranks_of_a_stage_hold_are_not_lost_in_silence(tmp_path):
    told = run_ranks(2, f"{CASES}:ranks_of_a_stage_differ", tmp_path)[0]
    assert "ranks 0 and 1 are both of pipeline stage 0, but hold different tensors" in told


def test_training_and_its_collectives_go_on_while_saves_are_written(tmp_path):
    assert run_ranks(4, f"{CASES}:training_goes_on_during_saves", tmp_path) == [5] * 4
