import pytest

from benchmarks.comparison import (
    disagreement,
    ratio,
    render_overheads,
    render_ratios,
    render_shares,
    render_table,
)
from benchmarks.trial import MODELS, Layout, Trial


def test_a_ratio_is_taken_within_each_round():
    # 2/1, 4/2, 3/2: the second round was twice as slow for both.
    found = ratio([2.0, 4.0, 3.0], [1.0, 2.0, 2.0])
    assert (found.median, found.smallest, found.largest) == (2.0, 1.5, 2.0)


def test_rounds_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0, 2.0], [1.0])


def test_disagreement_is_the_largest_relative_difference():
    # 0.25 / 2.5 is less than 0.2 / 1.0.
    assert disagreement([2.75, 1.2], [2.5, 1.0]) == pytest.approx(0.2)


def test_ratios_have_a_row_for_each_layout_and_a_dash_for_who_did_not_run():
    times = {
        "tp2": {"ours": [1.0, 1.0], "dtensor": [2.0, 4.0]},
        "dp2": {"ours": [3.0, 3.0], "ddp": [3.0, 3.0]},
    }
    table = render_ratios(times, ours="ours", peers=["dtensor", "ddp"])
    head, tp2, dp2 = (line.split() for line in table.splitlines())
    assert head == ["ours", "/", "peer", "dtensor", "ddp"]
    assert tp2 == ["tp2", "0.375", "[0.250-0.500]", "-"]
    assert dp2 == ["dp2", "-", "1.000", "[1.000-1.000]"]


def test_shares_are_of_one_process_in_the_same_round():
    times = {"tp2": {"one": [2.0, 4.0], "ours": [1.2, 2.0]}, "one": {"ours": [2.0, 2.0]}}
    table = render_shares(times, one_process="one", contestants=["ours"], ideals={"tp2": 0.5})
    assert table.splitlines()[1].split() == ["tp2", "3000.0", "0.500", "0.550", "[0.500-0.600]"]
    assert len(table.splitlines()) == 2


def test_the_floor_of_a_pipeline_is_longer_by_its_bubble():
    # 1.2 over 1.0 * 9/8 is 1.0667.
    times = {"pp2": {"ours": [1.2], "floor": [1.0]}}
    table = render_overheads(times, ours="ours", floor="floor", bubbles={"pp2": 9 / 8})
    assert "+6.7 % [+6.7 to +6.7]" in table


def test_columns_of_a_table_are_aligned():
    assert render_table(["a", "b"], [["longer", "1"]]) == "a        b\nlonger   1"


@pytest.mark.parametrize("text", ["", "tp", "tp0", "xp2", "tp2,dp2"])
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="write it like tp2"):
        Layout.parse(text)


def test_a_trial_survives_the_way_to_its_ranks():
    trial = Trial("ours", Layout(tp=2, pp=2), MODELS["llama"], 8, 2, warmup=1, steps=3)
    assert Trial.from_json(trial.as_json()) == trial
    assert trial.num_microbatches == 4
