"""Network interfaces: which one a rank talks through, and whether what the user set can work.

The functions take tables of interfaces; `list_interfaces` and `read_machine` alone look at this
machine.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_pt.errors import LaunchError, nearest

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"

# Bridges and tunnels of containers and virtual machines: each node has one, often with the same
# address, and none leads to another node.
_VIRTUAL = (
    *("br-", "cali", "cni", "docker", "dummy", "flannel", "ifb", "lxc", "lxdbr", "podman"),
    *("tap", "tun", "veth", "virbr", "vmnet", "zt"),
)


@dataclass(frozen=True)
class Interface:
    """One network interface that is up."""

    name: str
    addresses: tuple[str, ...]
    """IPv4 first, then IPv6; without link-local ones, which need a scope."""
    is_loopback: bool = False

    @property
    def is_virtual(self) -> bool:
        return self.name.startswith(_VIRTUAL)


def list_interfaces() -> tuple[Interface, ...]:
    """The interfaces of this machine that are up."""
    import psutil

    stats = psutil.net_if_stats()
    interfaces = []
    for name, entries in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        found = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        usable = tuple(sorted((a for a in found if not _is_link_local(a)), key=_is_ipv6))
        loopback = name == "lo" or any(is_loopback(address) for address in usable)
        interfaces.append(Interface(name, usable, loopback))
    return tuple(interfaces)


def read_machine() -> str:
    """What names this machine and its network: the boot, and the network namespace.

    Not the node's name: several Slurm nodes may run on one host, and two hosts may share a name.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


def choose_interface(
    interfaces: Sequence[Interface],
    *,
    wanted: str | None = None,
    several_machines: bool,
    source: str | None = None,
) -> Interface:
    """The interface that gloo and NCCL's bootstrap are to use.

    `wanted` is cluster.interface: one name, or several with commas for nodes whose names differ,
    of which the first that exists here is taken. `source` is the own address on the way to rank 0;
    across machines its interface is taken. Loopback is right inside one machine, refused across.
    """
    if wanted is not None:
        chosen = _find_wanted(interfaces, wanted)
    elif several_machines:
        holders = [one for one in interfaces if source in one.addresses]
        chosen = (holders or order_by_use(interfaces) or [Interface("lo", (), True)])[0]
    else:
        usable = [one for one in interfaces if one.addresses]
        chosen = min(usable, key=lambda one: not one.is_loopback, default=Interface("lo", (), True))
    if several_machines and chosen.is_loopback:
        raise LaunchError(
            f"interface {chosen.name} is loopback and the ranks are on several machines: each "
            f"would talk to itself. Interfaces here: {show_interfaces(interfaces)}. To fix: set "
            f"cluster.interface to one that leads to the other nodes."
        )
    return chosen


def order_by_use(interfaces: Sequence[Interface]) -> list[Interface]:
    """Those with an address, most likely to reach another machine first; loopback last."""
    usable = [one for one in interfaces if one.addresses]
    return sorted(usable, key=lambda one: (one.is_loopback, one.is_virtual))


def validate_interface_settings(
    environ: Mapping[str, str], interfaces: Sequence[Interface]
) -> None:
    """Raises LaunchError if gloo or NCCL cannot use what the environment tells them.

    gloo takes names, separated by commas. NCCL takes beginnings of names, `=` before exact ones
    and `^` before ones to leave out.
    """
    if environ.get(GLOO_VARIABLE):
        for name in environ[GLOO_VARIABLE].split(","):
            _require_interface(GLOO_VARIABLE, environ[GLOO_VARIABLE], name, interfaces)
    value = environ.get(NCCL_VARIABLE, "")
    if not value:
        return
    excluded, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = [name for name in value.lstrip("^").lstrip("=").split(",") if name]

    def is_named(interface: Interface) -> bool:
        return any(
            interface.name == name if exact else interface.name.startswith(name) for name in names
        )

    usable = [one for one in interfaces if one.addresses and is_named(one) is not excluded]
    if not names or not usable:
        hint = "an address, where NCCL wants a name" if _is_address(value) else "nothing here"
        raise LaunchError(
            f"{NCCL_VARIABLE}={value} selects {hint}. It takes beginnings of interface names with "
            f"commas; = before exact names, ^ before ones to leave out. Interfaces here: "
            f"{show_interfaces(interfaces)}. To fix: unset it, or name one of these."
        )


def show_interfaces(interfaces: Sequence[Interface]) -> str:
    """`lo (127.0.0.1), eth0 (10.0.0.5)`, for messages."""
    shown = [f"{one.name} ({', '.join(one.addresses) or 'no address'})" for one in interfaces]
    return ", ".join(shown) or "none that is up"


def is_loopback(address: str) -> bool:
    """Whether an address never leaves its machine: all of 127.0.0.0/8, and ::1."""
    return ipaddress.ip_address(plain_address(address)).is_loopback


def plain_address(address: str) -> str:
    """An address as written by people: an IPv4 one seen through an IPv6 socket loses `::ffff:`."""
    return address.removeprefix("::ffff:") if "." in address else address


def _find_wanted(interfaces: Sequence[Interface], wanted: str) -> Interface:
    by_name = {one.name: one for one in interfaces if one.addresses}
    for name in wanted.split(","):
        if name in by_name:
            return by_name[name]
    _require_interface("cluster.interface", wanted, wanted.split(",")[0], interfaces)
    raise AssertionError("unreachable: the name was not found above")


def _require_interface(key: str, value: str, name: str, interfaces: Sequence[Interface]) -> None:
    names = [one.name for one in interfaces if one.addresses]
    if name in names:
        return
    if name.startswith(("^", "=")):
        reason = f"{name[0]} is NCCL's way to select; here a plain interface name is due"
    elif _is_address(name):
        reason = f"{name} is an address; an interface name is due"
    elif any(one.name == name for one in interfaces):
        reason = f"{name} has no address"
    else:
        reason = f"no interface {name!r} is up here{nearest(name, names)}"
    raise LaunchError(
        f"{key}={value}: {reason}. Interfaces here: {show_interfaces(interfaces)}. To fix: set "
        f"{key} to one of these names, or leave it out to have it chosen."
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_ipv6(address: str) -> bool:
    return ":" in address


def _is_link_local(address: str) -> bool:
    return "%" in address or ipaddress.ip_address(address).is_link_local
