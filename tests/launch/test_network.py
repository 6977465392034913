"""Which interface, and which settings of it cannot work."""

from __future__ import annotations

import pytest

from slurm_pt.errors import LaunchError
from slurm_pt.launch.network import (
    Interface,
    choose_interface,
    list_interfaces,
    order_by_use,
    read_machine,
    validate_interface_settings,
)

LO = Interface("lo", ("127.0.0.1", "::1"), is_loopback=True)
DOCKER = Interface("docker0", ("172.17.0.1",))
ETH = Interface("ens5", ("10.0.0.5", "fd00::5"))
IB = Interface("ib0", ("10.1.0.5",))
BARE = Interface("eno2", ())
HERE = (LO, DOCKER, ETH, IB, BARE)


def test_this_machine_has_loopback_and_a_name():
    interfaces = list_interfaces()
    assert any(one.is_loopback and "127.0.0.1" in one.addresses for one in interfaces)
    assert all("%" not in address for one in interfaces for address in one.addresses)
    assert read_machine() == read_machine()


def test_f16_inside_one_machine_loopback_is_taken():
    assert choose_interface(HERE, several_machines=False) is LO
    assert choose_interface(HERE, several_machines=False, wanted="ens5") is ETH
    assert choose_interface((ETH,), several_machines=False) is ETH


def test_f16_across_machines_the_way_to_rank_0_decides():
    assert choose_interface(HERE, several_machines=True, source="10.1.0.5") is IB
    assert choose_interface(HERE, several_machines=True, source="fd00::5") is ETH
    assert choose_interface(HERE, several_machines=True) is ETH


@pytest.mark.parametrize(
    "options", [{"wanted": "lo"}, {"source": "127.0.0.1"}], ids=["wanted", "by the way"]
)
def test_f16_loopback_is_refused_across_machines(options):
    with pytest.raises(LaunchError, match="lo is loopback") as caught:
        choose_interface(HERE, several_machines=True, **options)
    assert "ens5 (10.0.0.5" in str(caught.value)
    with pytest.raises(LaunchError, match="loopback"):
        choose_interface((LO,), several_machines=True)


def test_virtual_interfaces_come_after_real_ones_and_loopback_last():
    assert order_by_use((LO, DOCKER, BARE, ETH)) == [ETH, DOCKER, LO]


def test_f17_nodes_whose_interface_names_differ_share_one_setting():
    assert choose_interface(HERE, several_machines=True, wanted="eth0,ens5") is ETH


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("^lo,docker0", "NCCL's way"),
        ("=ens5", "NCCL's way"),
        ("10.0.0.5", "is an address"),
        ("fd00::5", "is an address"),
        ("eth0", "no interface 'eth0' is up here"),
        ("ens50", "did you mean ens5"),
        ("eno2", "has no address"),
        ("ens5,eth1", "no interface 'eth1'"),
        ("1234", "no interface '1234'"),
        ("ens5,", "no interface ''"),
    ],
)
def test_f17_gloo_is_given_names_that_exist_here(value, reason):
    with pytest.raises(LaunchError) as caught:
        validate_interface_settings({"GLOO_SOCKET_IFNAME": value}, HERE)
    text = str(caught.value)
    assert f"GLOO_SOCKET_IFNAME={value}" in text
    assert reason in text
    assert "lo (127.0.0.1, ::1), docker0 (172.17.0.1), ens5 (10.0.0.5, fd00::5)" in text


@pytest.mark.parametrize("value", ["^lo,docker", "ens", "=ens5", "^=docker0", "ib,ens", "ib0", ""])
def test_f17_nccls_own_forms_are_left_alone(value):
    validate_interface_settings({"NCCL_SOCKET_IFNAME": value}, HERE)


@pytest.mark.parametrize("value", ["eth", "=ens", "10.0.0.5", "^lo,docker,ens,ib", "^", "eno2"])
def test_f17_an_nccl_setting_that_selects_nothing_is_refused(value):
    with pytest.raises(LaunchError, match="Interfaces here"):
        validate_interface_settings({"NCCL_SOCKET_IFNAME": value}, HERE)


def test_f17_gloo_may_be_given_several_interfaces():
    validate_interface_settings({"GLOO_SOCKET_IFNAME": "ens5,ib0"}, HERE)
    validate_interface_settings({}, HERE)
