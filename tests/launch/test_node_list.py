"""Node lists and counts, compared with Slurm's own expansion."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_pt.errors import LaunchError
from slurm_pt.launch.node_list import expand_counts, expand_node_list, parse_hosts

ACCEPTED = {
    "node[1,2]": ("node1", "node2"),
    "node[001-002]": ("node001", "node002"),
    "n[01-03,10]": ("n01", "n02", "n03", "n10"),
    "n[3,1,2]": ("n3", "n1", "n2"),
    "aa-[001-002,004],bb-[001-002]": ("aa-001", "aa-002", "aa-004", "bb-001", "bb-002"),
    "host[001,003-004,006]": ("host001", "host003", "host004", "host006"),
    "login7,gpu[001,003],big2": ("login7", "gpu001", "gpu003", "big2"),
    "n[9-11]": ("n9", "n10", "n11"),
    "n[09-11]": ("n09", "n10", "n11"),
    "n[8-0010]": ("n8", "n9", "n10"),
    "rack[0-1]n[08-09]": ("rack0n08", "rack0n09", "rack1n08", "rack1n09"),
    "n[1-2][3-4]": ("n13", "n14", "n23", "n24"),
    "a[1-2]4[5-6]": ("a145", "a146", "a245", "a246"),
    # Three brackets: the last runs fastest, then the first. Printed so by Slurm 22.05.8.
    "n[1-2]x[3-4]y[5-6]": (
        *("n1x3y5", "n1x3y6", "n2x3y5", "n2x3y6"),
        *("n1x4y5", "n1x4y6", "n2x4y5", "n2x4y6"),
    ),
    "gpu-a.site.example.org": ("gpu-a.site.example.org",),
    "1234": ("1234",),
    "[1-3]": ("1", "2", "3"),
}

REFUSED = [
    *("", " ", ",", "a,", ",a", "a,,b", "a, b", "n1 n2", "n[1, 2]", "n[ 1]", " n1"),
    *("n[01-", "n]01[", "n[", "n]", "n[]", "n[1,]", "n[[1]]", "n[1]]", "n[1[2]]"),
    *("n[1-2]-ib", "[1-2]n", "n[1-2].site.org", "n[1-2]4", "n[2-3],m[1-2]x,q"),
    *("n[5-3]", "n[010-9]", "n[a-c]", "n[1-3-5]", "n[-3]", "n[1-]", "n[1-4:2]", "n[1.5]"),
    *("n{1,2}", "n*", "user@n1", "n[1-2]:3", "n1;reboot", "$(id)", "-n", "é[1-2]", "n[\u0661]"),
    *("n[0-70000]", "n[0-999]x[0-999]", "n[1-99999999999999999999]", "n1\n", "(null)"),
]


@pytest.fixture(scope="module")
def slurm_environment(tmp_path_factory):
    """An environment in which scontrol can expand names without any daemon."""
    if shutil.which("scontrol") is None:
        pytest.skip("Slurm's scontrol is not installed")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=c\nSlurmctldHost=localhost\nNodeName=n1 NodeHostname=localhost\n")
    return {**os.environ, "SLURM_CONF": str(conf)}


def ask_slurm(text, environment):
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(answer.stdout.split())


@pytest.mark.parametrize(("text", "names"), ACCEPTED.items(), ids=list(ACCEPTED))
def test_f01_f02_a_node_list_is_expanded_whole(text, names):
    assert expand_node_list(text) == names


@pytest.mark.parametrize("text", list(ACCEPTED))
def test_f01_the_table_is_what_slurm_itself_prints(text, slurm_environment):
    assert ask_slurm(text, slurm_environment) == ACCEPTED[text]


@pytest.mark.parametrize("text", REFUSED)
def test_f04_an_unknown_form_is_refused_with_its_value_and_the_override(text):
    with pytest.raises(LaunchError) as caught:
        expand_node_list(text)
    assert repr(text) in str(caught.value)
    assert "SLURM_PT_HOSTS=" in str(caught.value)


literals = st.text("abcxyz0189-", min_size=0, max_size=3)
starts = st.from_regex(r"[a-z][a-z0-9-]{0,3}", fullmatch=True)


@st.composite
def ranges(draw):
    width = draw(st.integers(0, 4))
    first = draw(st.integers(0, 120))
    last = first + draw(st.integers(0, 3))
    return draw(st.sampled_from([f"{first:0{width}d}", f"{first:0{width}d}-{last}"]))


@st.composite
def entries(draw):
    text = draw(starts)
    for number in range(draw(st.integers(0, 4))):
        text += draw(literals) if number else ""
        text += f"[{','.join(draw(st.lists(ranges(), min_size=1, max_size=2)))}]"
    return text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(items=st.lists(entries(), min_size=1, max_size=3))
def test_f01_random_lists_expand_as_slurm_expands_them(items, slurm_environment):
    text = ",".join(items)
    assert expand_node_list(text) == ask_slurm(text, slurm_environment)


@settings(max_examples=300, deadline=None)
@given(st.text("an01[]-,. ", max_size=12))
def test_f04_any_text_gives_names_or_a_launch_error(text):
    try:
        names = expand_node_list(text)
    except LaunchError:
        return
    assert names
    assert all(name and not set("[], ") & set(name) for name in names)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1(x2)", (1, 1)),
        ("2(x3),1", (2, 2, 2, 1)),
        ("4,2,1", (4, 2, 1)),
        ("40,8", (40, 8)),
        ("3", (3,)),
    ],
)
def test_f05_counts_per_node_are_written_out(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "2(x", "2(x0)", "0", "x3", "2(3)", "1, 2", "2,", "-1", "2(x3)1", "1(x99999999)"]
)
def test_f05_counts_that_are_not_understood_are_refused(text):
    with pytest.raises(LaunchError, match="counts per node"):
        expand_counts(text)


def test_f04_the_override_takes_plain_names_only():
    assert parse_hosts("n01,gpu-a.site.org") == ("n01", "gpu-a.site.org")
    for text in ("n[01-02]", "n01, n02", "n01,", ""):
        with pytest.raises(LaunchError, match="SLURM_PT_HOSTS="):
            parse_hosts(text)
