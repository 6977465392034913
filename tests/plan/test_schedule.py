import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt.config.choices import Schedule
from slurm_pt.plan.schedule import (
    Action,
    Pass,
    forward_table,
    interleaved,
    make_table,
    one_f_one_b,
)
from slurm_pt.plan.schedule_cost import bubble_share, end_times, peak_in_flight

NO_VIRTUAL_STAGES = [Schedule.gpipe, Schedule.one_f_one_b, Schedule.zero_bubble]
PP, COUNT, VIRTUAL = st.integers(1, 8), st.integers(1, 17), st.integers(1, 4)


def rows(table):
    return [" ".join(str(action) for action in actions) for actions in table]


def one_f_one_b_rows(pp, num_microbatches):
    return rows(make_table(Schedule.one_f_one_b, pp=pp, num_microbatches=num_microbatches))


def test_four_stages_and_eight_micro_batches_follow_the_paper():
    # Narayanan et al. 2021, figure 4 (top), without its interleaving.
    assert one_f_one_b_rows(4, 8) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_one_stage_alternates():
    assert one_f_one_b_rows(1, 3) == ["F0 B0 F1 B1 F2 B2"]


def test_fewer_micro_batches_than_stages_are_all_warm_up_on_the_first_stages():
    assert one_f_one_b_rows(4, 2) == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_two_ranks_with_two_chunks_each_take_turns_in_groups_of_two():
    # Warm-up passes 2 * (pp - rank - 1) + (v - 1) * pp: 4 on rank 0, 2 on rank 1.
    assert rows(interleaved(pp=2, num_microbatches=4, virtual_stages=2)) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_a_last_smaller_group_lacks_nothing_but_its_micro_batches():
    whole = interleaved(pp=4, num_microbatches=8, virtual_stages=3)
    smaller = interleaved(pp=4, num_microbatches=5, virtual_stages=3)
    assert smaller == tuple(
        tuple(action for action in actions if action.microbatch < 5) for actions in whole
    )


def test_weight_passes_start_later_on_later_stages_of_zero_bubble():
    table = make_table(Schedule.zero_bubble, pp=3, num_microbatches=4)
    assert rows(table) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


@given(schedule=st.sampled_from(Schedule), pp=PP, count=COUNT, virtual=VIRTUAL)
def test_each_micro_batch_goes_each_way_through_each_chunk_once(schedule, pp, count, virtual):
    virtual = virtual if schedule is Schedule.interleaved else 1
    kinds = (
        {Pass.forward, Pass.input_gradient, Pass.weight_gradient}
        if schedule is Schedule.zero_bubble
        else {Pass.forward, Pass.backward}
    )
    for actions in make_table(schedule, pp=pp, num_microbatches=count, virtual_stages=virtual):
        expected = {Action(k, m, c) for k in kinds for m in range(count) for c in range(virtual)}
        assert set(actions) == expected
        assert len(actions) == len(expected)
        for kind in kinds:
            for chunk in range(virtual):
                passes = [a.microbatch for a in actions if (a.kind, a.chunk) == (kind, chunk)]
                assert passes == list(range(count))


@given(pp=PP, count=COUNT, virtual=VIRTUAL)
def test_an_evaluation_makes_forward_passes_alone(pp, count, virtual):
    for actions in forward_table(pp=pp, num_microbatches=count, virtual_stages=virtual):
        assert len(actions) == count * virtual
        assert all(action.kind is Pass.forward for action in actions)


# ------------------------------------------------------------------------------- the idle time


@given(
    schedule=st.sampled_from([Schedule.gpipe, Schedule.one_f_one_b]),
    pp=PP,
    count=COUNT,
    weight_s=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_the_bubble_is_p_minus_one_of_m_plus_p_minus_one(schedule, pp, count, weight_s):
    table = make_table(schedule, pp=pp, num_microbatches=count)
    expected = (pp - 1) / (count + pp - 1)
    assert bubble_share(table, weight_s=weight_s) == pytest.approx(expected, abs=1e-12)


@given(pp=PP, groups=st.integers(1, 5), virtual=VIRTUAL, weight_s=st.sampled_from([0.0, 1.0, 2.0]))
def test_the_bubble_is_as_many_times_smaller_as_there_are_virtual_stages(
    pp, groups, virtual, weight_s
):
    # Narayanan et al. 2021, section 2.2.2: of the ideal time, 1 / v * (p - 1) / m.
    count = groups * pp
    table = make_table(Schedule.interleaved, pp=pp, num_microbatches=count, virtual_stages=virtual)
    expected = (pp - 1) / (virtual * count + pp - 1)
    assert bubble_share(table, weight_s=weight_s) == pytest.approx(expected, abs=1e-12)


@given(pp=PP, count=COUNT, virtual=VIRTUAL)
def test_a_smaller_last_group_costs_no_more_time_than_a_whole_one(pp, count, virtual):
    def ends(number):
        table = make_table(
            Schedule.interleaved, pp=pp, num_microbatches=number, virtual_stages=virtual
        )
        seconds = {Pass.forward: 1.0, Pass.backward: 2.0}
        return max(max(row) for row in end_times(table, seconds))

    assert ends(count) <= ends(-(-count // pp) * pp)


@given(
    pp=PP,
    more=st.integers(0, 12),
    durations=st.sampled_from(
        [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 1.0, 0.5), (2.0, 1.0, 1.0), (1.0, 2.0, 1.0)]
    ),
)
def test_zero_bubble_stands_idle_as_long_as_the_paper_says(pp, more, durations):
    # Qi et al. 2023, table 1: (p - 1) * (T_F + T_B - T_W), for m >= p and T_W <= T_B.
    forward_s, input_s, weight_s = durations
    count = pp + more
    table = make_table(Schedule.zero_bubble, pp=pp, num_microbatches=count)
    idle = (pp - 1) * (forward_s + input_s - weight_s)
    expected = idle / (idle + count * (forward_s + input_s + weight_s))
    found = bubble_share(table, forward_s=forward_s, input_s=input_s, weight_s=weight_s)
    assert found == pytest.approx(expected, abs=1e-12)


@given(pp=PP, more=st.integers(0, 12))
def test_longer_weight_passes_leave_the_forward_passes_of_the_start_idle(pp, more):
    # Then only the first forward pass of each earlier stage is waited for: (p - 1) * T_F.
    count = pp + more
    table = make_table(Schedule.zero_bubble, pp=pp, num_microbatches=count)
    found = bubble_share(table, forward_s=1.0, input_s=0.8, weight_s=1.2)
    assert found == pytest.approx((pp - 1) / (3 * count + pp - 1), abs=1e-12)


@given(pp=PP, count=COUNT)
def test_zero_bubble_is_never_slower_than_1f1b(pp, count):
    zero, plain = (
        bubble_share(make_table(schedule, pp=pp, num_microbatches=count))
        for schedule in (Schedule.zero_bubble, Schedule.one_f_one_b)
    )
    assert zero <= plain + 1e-12


def test_a_table_that_dead_locks_is_refused():
    forward, backward = Action(Pass.forward, 0), Action(Pass.backward, 0)
    with pytest.raises(ValueError, match="dead-locks"):
        bubble_share([[backward, forward], [forward, backward]])


# --------------------------------------------------------------------------------- the memory


@given(pp=PP, count=COUNT)
def test_1f1b_holds_fewer_micro_batches_on_later_stages_and_gpipe_all(pp, count):
    one = make_table(Schedule.one_f_one_b, pp=pp, num_microbatches=count)
    assert peak_in_flight(one) == tuple(min(pp - stage, count) for stage in range(pp))
    all_at_once = make_table(Schedule.gpipe, pp=pp, num_microbatches=count)
    assert peak_in_flight(all_at_once) == (count,) * pp


@given(pp=PP, count=COUNT)
def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b(pp, count):
    table = make_table(Schedule.zero_bubble, pp=pp, num_microbatches=count)
    assert max(peak_in_flight(table)) == min(pp, count)


@given(pp=PP, groups=st.integers(2, 4), virtual=st.integers(2, 4))
def test_interleaving_holds_more(pp, groups, virtual):
    # The warm-up passes and the one that follows, of 1 / v of the layers each. So on the first
    # rank 1F1B's pp become pp * (1 + (pp - 1) / (pp * v)): Narayanan et al. 2021, section 2.2.2.
    table = make_table(
        Schedule.interleaved, pp=pp, num_microbatches=groups * pp, virtual_stages=virtual
    )
    expected = [2 * (pp - rank - 1) + (virtual - 1) * pp + 1 for rank in range(pp)]
    assert list(peak_in_flight(table)) == expected


# --------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("stage", "stages", "num_microbatches"),
    [pytest.param(2, 2, 1, id="no such stage"), pytest.param(0, 2, 0, id="no micro-batch")],
)
def test_impossible_schedules_are_refused(stage, stages, num_microbatches):
    with pytest.raises(ValueError, match=r"stage|num_microbatches"):
        one_f_one_b(stage=stage, stages=stages, num_microbatches=num_microbatches)


@pytest.mark.parametrize("schedule", NO_VIRTUAL_STAGES)
def test_only_interleaving_has_virtual_stages(schedule):
    with pytest.raises(ValueError, match="has no virtual stages; interleaved has"):
        make_table(schedule, pp=2, num_microbatches=4, virtual_stages=2)
    with pytest.raises(ValueError, match="must be at least 1"):
        make_table(schedule, pp=2, num_microbatches=0)
