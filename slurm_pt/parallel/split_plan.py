"""How a user says where a module of theirs may be split. Names and numbers only.

A plan holds for every layout: it says what can be split, the layout into how many parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from slurm_pt.errors import Problem, nearest
from slurm_pt.parallel.tensor import Rows

ROLES = {
    "column": "an nn.Linear whose output features are split",
    "row": "an nn.Linear whose input features are split, its output summed",
    "vocabulary": "an nn.Embedding whose rows are split, its output summed",
    "sequence": "runs on each rank's part of the sequence: a norm, a dropout",
    "scatter": "runs on the whole sequence, its output is then split",
    "gather": "runs on the whole sequence, which its input is first made",
}


Role = str | Mapping[str, int | Rows]
"""A name out of `ROLES`, or for an nn.Linear that is several in one (query, key and value) the
output features of each by name, in the order of the weight's rows; split by columns each."""


@dataclass(frozen=True)
class SplitPlan:
    """What may be split in a module, by the names that `named_modules()` gives.

    In a pattern `*` stands for one part of a dotted name: "blocks.*.attention.output".
    """

    modules: Mapping[str, Role] = field(default_factory=dict)
    """Pattern to role. "sequence" may name a parameter too. Without a split sequence (config key
    parallel.sequence) the roles sequence, scatter and gather change nothing."""
    units: Sequence[str] = ()
    """The modules that make up the model, in the order in which each takes what the one before
    gave; needed for pipeline stages. Empty: the model is called as a whole."""
    sequence_dim: int = 1
    """Where the sequence is in activations: 1 for [batch, seq, features], 0 for [seq, batch, ...],
    which costs no copies when the sequence is split."""

    def assign(self, names: Sequence[str], problems: list[Problem]) -> dict[str, Role]:
        """The role of each name that has one. Adds patterns that are wrong to `problems`."""
        found: dict[str, Role] = {}
        by: dict[str, str] = {}
        for pattern, role in self.modules.items():
            key = f"modules[{pattern!r}]"
            wrong = _role_problem(key, role)
            if wrong is not None:
                problems.append(wrong)
                continue
            matched = [name for name in names if matches(pattern, name)]
            if not matched:
                problems.append(_no_match(key, role, pattern, names))
            for name in matched:
                if name in found:
                    rule = f"{name} is named by the pattern {by[name]!r} too"
                    problems.append(Problem(key, role, rule, "leave one of them out"))
                found[name], by[name] = role, pattern
        return found

    def expand_units(self, names: Sequence[str], problems: list[Problem]) -> list[str]:
        """The units by name, in order. [""], the whole model, where none are given."""
        if not self.units:
            return [""]
        units: list[str] = []
        for pattern in self.units:
            matched = [name for name in names if matches(pattern, name)]
            if not matched:
                problems.append(_no_match("units", pattern, pattern, names))
            units += matched
        for first, second in _overlaps(units):
            rule = f"{second} is a part of {first}, or named twice"
            problems.append(Problem("units", list(self.units), rule, "name one of them alone"))
        return units


def _role_problem(key: str, role: object) -> Problem | None:
    if isinstance(role, str):
        if role in ROLES:
            return None
        rule = f"no such role{nearest(role, ROLES)}"
        return Problem(key, role, rule, f"use one of {', '.join(ROLES)}")
    sizes = role.values() if isinstance(role, Mapping) else [None]
    features = [size.features if isinstance(size, Rows) else size for size in sizes]
    if features and all(type(number) is int and number > 0 for number in features):
        return None
    fix = f"use one of {', '.join(ROLES)}, or the output features of each part by name"
    return Problem(key, role, "neither a role nor numbers of output features", fix)


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern, part by part.

    >>> matches("blocks.*.norm", "blocks.3.norm"), matches("blocks.*", "blocks.3.norm")
    (True, False)
    """
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))


def inside(name: str, module: str) -> bool:
    """Whether a name is that of a module or of something in it; "" is the root.

    >>> inside("blocks.1.norm", "blocks.1"), inside("blocks.10", "blocks.1")
    (True, False)
    """
    return module == "" or name == module or name.startswith(module + ".")


def _overlaps(units: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, first in enumerate(units):
        for second in units[number + 1 :]:
            if inside(second, first):
                yield first, second
            elif inside(first, second):
                yield second, first


def _no_match(key: str, value: object, pattern: str, names: Sequence[str]) -> Problem:
    shapes = dict.fromkeys(
        ".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names
    )
    rule = f"{pattern!r} fits the name of no module{nearest(pattern, shapes)}"
    return Problem(key, value, rule, "name modules as model.named_modules() does, * for any part")
