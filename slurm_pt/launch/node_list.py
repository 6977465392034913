"""Slurm's short forms for node lists and counts, written out. Pure.

`scontrol show hostnames` is not asked: it answers an unclosed list with a junk name, and its
exit code is 0 even when it refuses (22.05.8). What it expands without doubt is expanded here in
the same order; every other form is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product

from slurm_pt.errors import LaunchError

HOSTS_VARIABLE = "SLURM_PT_HOSTS"
"""Environment variable with the host names in node order, separated by commas."""

_MOST_NAMES = 65536  # Slurm's own limit for one range
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_LITERAL = re.compile(r"[A-Za-z0-9._-]*")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([1-9][0-9]*)(?:\(x([1-9][0-9]*)\))?")


def expand_node_list(text: str) -> tuple[str, ...]:
    """The names of a node list in Slurm's order.

    >>> expand_node_list("login7,gpu[001,003],big2")
    ('login7', 'gpu001', 'gpu003', 'big2')
    >>> expand_node_list("rack[0-1]n[08-10]")[:4]
    ('rack0n08', 'rack0n09', 'rack0n10', 'rack1n08')
    """
    names: list[str] = []
    for entry in _entries(text):
        if "[" in entry or "]" in entry:
            literals, groups = _split_brackets(entry, text)
            names.extend(islice(_combine(literals, groups), _MOST_NAMES + 1))
        elif _NAME.fullmatch(entry):
            names.append(entry)
        else:
            raise _refusal(text, f"{entry!r} is no node name")
        if len(names) > _MOST_NAMES:
            raise _refusal(text, f"more than {_MOST_NAMES} names")
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """One count per node, from the form of SLURM_TASKS_PER_NODE and SLURM_JOB_CPUS_PER_NODE.

    >>> expand_counts("2(x3),1")
    (2, 2, 2, 1)
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise LaunchError(
                f"counts per node {text!r}: {item!r} is not understood. Slurm writes N or "
                f"N(xTIMES), as in 2(x3),1. To fix: start the ranks with srun, which sets it anew."
            )
        repeats = int(match[2] or 1)
        if len(counts) + repeats > _MOST_NAMES:
            raise LaunchError(f"counts per node {text!r}: more than {_MOST_NAMES} nodes.")
        counts.extend([int(match[1])] * repeats)
    return tuple(counts)


def parse_hosts(text: str) -> tuple[str, ...]:
    """The host names of SLURM_PT_HOSTS: plain names, nothing to expand."""
    names = tuple(text.split(","))
    wrong = [name for name in names if not _NAME.fullmatch(name)]
    if wrong:
        raise LaunchError(
            f"{HOSTS_VARIABLE}={text!r}: {wrong[0]!r} is no host name. It takes plain names in "
            f"node order with commas and no spaces. To fix: {HOSTS_VARIABLE}=n01,n02."
        )
    return names


def _entries(text: str) -> Iterator[str]:
    """The parts between those commas that stand outside brackets."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
        if depth not in (0, 1):
            raise _refusal(text, f"unexpected {character!r} at character {position + 1}")
    if depth:
        raise _refusal(text, "a bracket is not closed")
    yield text[start:]


def _split_brackets(entry: str, text: str) -> tuple[list[str], list[list[str]]]:
    """`a[1-2]b[3]` as the literals a, b and the numbers of each bracket."""
    *parts, after = entry.split("]")
    if after:
        raise _refusal(text, f"{after!r} follows a bracket, which Slurm does not allow at the end")
    literals: list[str] = []
    groups: list[list[str]] = []
    for part in parts:
        literal, _, ranges = part.partition("[")
        if not _LITERAL.fullmatch(literal) or (not literals and literal[:1] in ("-", ".")):
            raise _refusal(text, f"{literal!r} cannot be part of a node name")
        literals.append(literal)
        groups.append([number for item in ranges.split(",") for number in _numbers(item, text)])
    return literals, groups


def _numbers(item: str, text: str) -> list[str]:
    """`08-10` as 08, 09, 10: as wide as the first number is written."""
    match = _RANGE.fullmatch(item)
    if match is None:
        raise _refusal(text, f"{item!r} is neither a number nor a range like 01-03")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise _refusal(text, f"the range {item!r} runs backwards")
    if last - first >= _MOST_NAMES:
        raise _refusal(text, f"the range {item!r} has more than {_MOST_NAMES} numbers")
    return [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]


def _combine(literals: list[str], groups: list[list[str]]) -> Iterator[str]:
    """All names of one entry, in the order in which scontrol prints them.

    The last bracket runs fastest, then the first, the second and so on: Slurm expands the last
    one in place and takes the ones before it apart from the right (22.05.8, three brackets).
    """
    *leading, last = groups
    for slow in product(*reversed(leading)):
        stem = "".join(
            literal + number for literal, number in zip(literals, reversed(slow), strict=False)
        )
        for number in last:
            yield stem + literals[-1] + number


def _refusal(text: str, reason: str) -> LaunchError:
    return LaunchError(
        f"node list {text!r}: {reason}. Slurm's form is names with numbers in brackets, as in "
        f"login7,n[01-03,10], with no spaces. To fix: give the host names in node order yourself, "
        f"{HOSTS_VARIABLE}=n01,n02."
    )
