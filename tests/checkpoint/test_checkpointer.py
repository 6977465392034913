"""Saving and resuming by several ranks over gloo.

Starting ranks takes longer than what they do here, so each fixture starts them once and runs
several cases; the tests look at what each case returned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.checkpoint.toy import GROUPS_TIMEOUT_S
from tests.ranks import REPOSITORY, run_ranks

pytestmark = pytest.mark.ranks

CASES = "tests.checkpoint.cases"
FOUR_RANKS = [(2, 2, 1), (4, 1, 1), (1, 2, 2), (1, 1, 4), (2, 1, 2), (1, 4, 1)]
ALL = [(1, 1, 1), *FOUR_RANKS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of step 7 by one rank and by six layouts of four ranks.

    All were loaded into all layouts of four ranks; the second value counts those loads.
    """
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, f"{CASES}:what_one_rank_saves", folder, folder / "formats")
    loads = run_ranks(4, f"{CASES}:save_then_load", folder, FOUR_RANKS, ALL, FOUR_RANKS)
    return folder, loads


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    names = [
        "ranks_save_different_steps",
        "another_job_owns_the_run",
        "tensors_that_do_not_fit",
        "ranks_of_a_stage_differ",
        "tensors_known_only_from_the_checkpoint",
    ]
    return run_ranks(2, f"{CASES}:several", tmp_path_factory.mktemp("two"), names)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    names = [
        "random_state_of_each_rank",
        "fall_back_together",
        "full_disk_on_one_rank",
        "training_goes_on_during_saves",
        "a_rank_that_never_comes",
    ]
    return run_ranks(4, f"{CASES}:several", tmp_path_factory.mktemp("four"), names)


def test_a_checkpoint_of_any_layout_loads_bit_equal_into_any_layout_of_four_ranks(saved):
    """F55, F56, F58: weights and optimizer moments, each element recognisable."""
    assert saved[1] == [7 * 6] * 4


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        pytest.param(1, [(1, 1, 1)], id="one rank"),
        pytest.param(2, [(2, 1, 1), (1, 2, 1), (1, 1, 2)], id="two ranks"),
    ],
)
def test_a_checkpoint_of_any_layout_loads_bit_equal_into_fewer_ranks(saved, world_size, layouts):
    """F55, F56, F58."""
    loads = run_ranks(world_size, f"{CASES}:load_layouts", saved[0], ALL, layouts)
    assert loads == [7 * len(layouts)] * world_size


def test_eight_ranks_in_all_three_dimensions_load_and_save(saved):
    """F55, F56: TP=2 x PP=2 x DP=2, from one rank, from TP=2 x PP=2, and from itself."""
    layout = (2, 2, 2)
    others = [(1, 1, 1), (2, 2, 1), layout]
    loads = run_ranks(8, f"{CASES}:save_then_load", saved[0], [layout], others, [layout])
    assert loads == [3] * 8


def test_the_files_can_be_read_without_this_package_and_hold_no_pickle(saved):
    """F59: JSON and safetensors only."""
    safetensors = pytest.importorskip("safetensors")
    path = saved[0] / "2x2x1" / "step_00000007"
    suffixes = {file.suffix for file in path.iterdir()}
    assert suffixes == {".json", ".safetensors"}
    seen = 0
    for file in path.glob("*.safetensors"):
        with safetensors.safe_open(file, "numpy") as content:
            offsets = json.loads(content.metadata()["offsets_in_whole_tensor"])
            name = "optimizer.exp_avg.layers.1.down.weight"
            if name in content.keys():  # noqa: SIM118  # it is no dict
                # 6 x 24, split in two along dim 1: consecutive numbers, 24 from row to row.
                part = content.get_tensor(name)
                assert part.shape == (6, 12)
                assert part[1, 0] - part[0, 0] == 24
                seen += 1 + offsets[name][1]
    assert seen == (1 + 0) + (1 + 12)


def test_every_number_format_comes_back_bit_equal_also_through_views(saved):
    """The rank that saved them also loaded and compared them."""
    assert (saved[0] / "formats" / "step_00000001" / "manifest.json").exists()


def test_each_rank_gets_its_own_random_state_back(four_ranks):
    """F54: TP=2 x DP=2, python, numpy and torch."""
    drawn = [results["random_state_of_each_rank"] for results in four_ranks]
    assert len({tuple(numbers) for numbers in drawn}) == 4


def test_all_ranks_skip_a_damaged_step_together_and_say_why(four_ranks):
    """F47: file, found and expected checksum, and what was used instead; F45: none usable stops."""
    (reason,) = four_ranks[0]["fall_back_together"]
    assert reason.startswith("step_00000002: rank_00003.safetensors has sha256 ")
    assert ", expected " in reason
    assert reason.endswith("used instead: step_00000001")


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_keeps_the_old_checkpoint(four_ranks):
    told = {results["full_disk_on_one_rank"] for results in four_ranks}
    assert len(told) == 1
    assert "rank 2" in told.pop()


def test_training_and_its_collectives_go_on_while_saves_are_written(four_ranks):
    assert [results["training_goes_on_during_saves"] for results in four_ranks] == [5] * 4


def test_a_rank_that_never_enters_the_save_is_named_within_the_time_limit(four_ranks):
    """F48."""
    outcomes = [results["a_rank_that_never_comes"] for results in four_ranks]
    told = outcomes[0][1]
    assert "save(step=1) within 1 s" in told
    assert "Ranks 1 failed" in told
    # Long before the groups' own time limit, which only a hung rank would reach.
    assert max(waited for waited, _ in outcomes) < GROUPS_TIMEOUT_S


def test_ranks_that_save_different_steps_are_told_which(two_ranks):
    """F48: the decision was not made once for all."""
    assert "{0: 5, 1: 6}" in two_ranks[0]["ranks_save_different_steps"]


def test_a_save_is_not_committed_when_another_job_owns_the_run_by_then(two_ranks):
    assert "another_job_owns_the_run" in two_ranks[0]


def test_a_checkpoint_of_another_model_is_refused_with_name_expected_and_found(two_ranks):
    """F58; and the tensors are left as they were."""
    told = two_ranks[0]["tensors_that_do_not_fit"]
    name = "optimizer.exp_avg.layers.1.up.weight"
    assert f"{name}: expected shape (24, 7), found (24, 6)" in told["shape"]
    assert f"{name}: expected torch.bfloat16, found torch.float32" in told["format"]
    assert "new.weight: expected shape (3,), found nothing" in told["missing"]
    assert f"{name}: expected nothing, found it" in told["extra"]


def test_tensors_that_only_some_ranks_of_a_stage_hold_are_not_lost_in_silence(two_ranks):
    told = two_ranks[0]["ranks_of_a_stage_differ"]
    assert "ranks 0 and 1 are both of pipeline stage 0, but hold different tensors" in told


def test_tensors_can_be_allocated_from_what_the_checkpoint_holds(two_ranks):
    assert [results["tensors_known_only_from_the_checkpoint"] for results in two_ranks] == [4, 4]


def test_after_a_kill_at_any_moment_of_an_asynchronous_save_the_ranks_resume(tmp_path):
    """F42, F44: 15 rounds of two ranks, keep_last=1; each round loads what the last one left."""
    folder = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.kill_rounds", str(folder), "15"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    reached, cut_off = map(int, done.stdout.split())
    assert reached > 5  # saves were committed between the kills,
    assert cut_off > 3  # and kills did hit saves
