import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pt.plan.schedule import Action, Pass, bubble_share, one_f_one_b, schedule_table


def rows(stages, num_microbatches):
    table = schedule_table(stages=stages, num_microbatches=num_microbatches)
    return [" ".join(str(action) for action in actions) for actions in table]


def test_four_stages_and_eight_micro_batches_follow_the_paper():
    # Narayanan et al. 2021, figure 4 (top), without its interleaving.
    assert rows(4, 8) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_one_stage_alternates():
    assert rows(1, 3) == ["F0 B0 F1 B1 F2 B2"]


def test_fewer_micro_batches_than_stages_are_all_warm_up_on_the_first_stages():
    assert rows(4, 2) == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


@settings(deadline=None)
@given(stages=st.integers(1, 9), num_microbatches=st.integers(1, 20))
def test_each_micro_batch_goes_each_way_once_and_few_are_in_flight(stages, num_microbatches):
    for stage, actions in enumerate(
        schedule_table(stages=stages, num_microbatches=num_microbatches)
    ):
        for kind in Pass:
            passes = [action.microbatch for action in actions if action.kind is kind]
            assert passes == list(range(num_microbatches))
        in_flight = most = 0
        for action in actions:
            in_flight += 1 if action.kind is Pass.forward else -1
            most = max(most, in_flight)
        assert most == min(stages - stage, num_microbatches)


@settings(deadline=None)
@given(
    stages=st.integers(1, 9),
    num_microbatches=st.integers(1, 20),
    backward_s=st.sampled_from([1.0, 2.0, 3.0]),
)
def test_the_bubble_is_p_minus_one_of_m_plus_p_minus_one(stages, num_microbatches, backward_s):
    table = schedule_table(stages=stages, num_microbatches=num_microbatches)
    expected = (stages - 1) / (num_microbatches + stages - 1)
    assert bubble_share(table, backward_s=backward_s) == pytest.approx(expected, abs=1e-12)


def test_a_table_that_dead_locks_is_refused():
    forward, backward = Action(Pass.forward, 0), Action(Pass.backward, 0)
    with pytest.raises(ValueError, match="dead-locks"):
        bubble_share([[backward, forward], [forward, backward]])


@pytest.mark.parametrize(
    ("stage", "stages", "num_microbatches"),
    [pytest.param(2, 2, 1, id="no such stage"), pytest.param(0, 2, 0, id="no micro-batch")],
)
def test_impossible_schedules_are_refused(stage, stages, num_microbatches):
    with pytest.raises(ValueError, match=r"stage|num_microbatches"):
        one_f_one_b(stage=stage, stages=stages, num_microbatches=num_microbatches)
