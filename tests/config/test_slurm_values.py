"""Pure tables; tests/submit/test_slurm_values_for_real.py asks sbatch about the same values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt.config.slurm_values import (
    parse_memory_mib,
    parse_time_limit_s,
    render_duration,
    suggest_memory,
)
from tests.config.slurm_tables import MEMORY, MEMORY_REFUSED, TIME_REFUSED, TIME_S


@pytest.mark.parametrize(("text", "mib"), MEMORY.items())
def test_memory_means_what_it_means_to_slurm_f94(text, mib):
    assert parse_memory_mib(text) == mib


@pytest.mark.parametrize("text", MEMORY_REFUSED)
def test_memory_that_slurm_refuses_is_refused_with_the_rule_f94(text):
    with pytest.raises(ValueError, match="whole number and one of K, M, G, T"):
        parse_memory_mib(text)


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("1.5G", "1536M"),
        ("1.5T", "1536G"),
        ("0.5", "512K"),
        ("64.0", "64"),
        ("120.0g", "120G"),
        ("64GiB", "64G"),
        ("64 GB", "64G"),
        ("1.5K", "2K"),  # never less than was asked for, and never 0, which is all of the node
        ("0.1K", "1K"),
        ("much", "64G"),
        ("", "64G"),
        ("-1", "64G"),
    ],
)
def test_a_memory_spelling_that_works_is_suggested_f94(text, suggestion):
    assert suggest_memory(text) == suggestion


@given(st.text(st.sampled_from("0123456789.kKMGTiB ")))
def test_whatever_is_suggested_is_accepted(text):
    parse_memory_mib(suggest_memory(text))


@pytest.mark.parametrize(("text", "seconds"), TIME_S.items())
def test_time_means_what_it_means_to_slurm_f95(text, seconds):
    assert parse_time_limit_s(text) == seconds


@pytest.mark.parametrize("text", TIME_REFUSED)
def test_time_that_slurm_refuses_is_refused_with_the_rule_f95(text):
    with pytest.raises(ValueError, match=r"days-hours:minutes|longer than Slurm can count"):
        parse_time_limit_s(text)


@given(st.text(max_size=8) | st.text(st.sampled_from("0123456789:- "), max_size=12))
def test_any_text_is_a_time_or_a_value_error(text):
    try:
        seconds = parse_time_limit_s(text)
    except ValueError:
        return
    assert seconds is None or (seconds > 0 and seconds % 60 == 0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (45, "45 s"), (240, "4 min"), (90061, "1 d 1 h 1 min 1 s"), (None, "no limit")],
)
def test_a_duration_in_words(seconds, words):
    assert render_duration(seconds) == words
