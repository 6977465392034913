"""docs/pitfalls.md promises a test for each pitfall: it is there, and so are those below."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from slurm_pt.config.choices import Schedule
from slurm_pt.config.schema import ParallelConfig

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "pitfalls.md").read_text()
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| (?!---|pitfall )", line)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_every_pitfall_has_an_answer_and_tests_that_exist(row):
    pitfall, here, shown_by = (cell.strip() for cell in row.strip("| ").split(" | "))
    assert pitfall
    assert here
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown_by)
    assert ", ".join(f"`{file}::{test}`" for file, test in named) == shown_by
    for file, test in named:
        tree = ast.parse((REPOSITORY / file).read_text())
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert test in names, f"{file} has no {test}"


REFUSED = {
    "torch.distributed.tensor": "DTensor",
    "torch.distributed._tensor": "DTensor",
    "torch.distributed.fsdp": "FSDP",
    "torch.distributed._tools": "MemTracker",
    "torch.load": "pickle",
    "pickle": "pickle",
}


def test_no_module_uses_what_is_a_pitfall():
    """No DTensor, no pickled state, no reduction that gloo lacks."""
    found = []
    for path in sorted((REPOSITORY / "slurm_pt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            for name in names:
                refused = [why for key, why in REFUSED.items() if f"{name}.".startswith(f"{key}.")]
                if refused or name.endswith(("ReduceOp.AVG", "ReduceOp.PREMUL_SUM")):
                    found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno} {name}")
    assert not found, "\n".join(found)


def test_the_nvml_package_is_nvidias_own():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.match(r"[\w-]+", entry)[0] for entries in wanted for entry in entries}
    assert "nvidia-ml-py" in names
    assert "pynvml" not in names


def test_the_default_schedule_is_1f1b():
    assert ParallelConfig().schedule is Schedule.one_f_one_b
