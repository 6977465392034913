"""Who may import whom: read from the source of every module, imports inside functions included."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "slurm_pt"

# Each may import from those before it; those on one line are one layer.
LAYERS = [
    ("errors",),
    ("config",),
    ("plan",),
    ("files", "run_dir", "run_inputs", "owner"),
    ("submit",),
    ("launch",),
    ("parallel",),
    ("training",),
    ("checkpoint",),
    ("monitor",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
WIRING = {
    *("worker", "trainer", "starting", "run", "program", "session", "launcher", "compose"),
    *("cli", "cli_convert", "demo", "demo_program", "hydra_plugins"),
}
WITH_TORCH = {"parallel", "training", "checkpoint", "trainer", "starting", "run"}
TORCH = {"torch", "deepspeed"}
DEVCLUSTER_MAY = {"errors", "devcluster"}


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import that runs; those under TYPE_CHECKING do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports_of(ast.Module([other], []))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        else:
            yield from imports_of(node)


def stage_of(name: str) -> str | None:
    """The stage that a dotted name under slurm_pt belongs to; None for the package's own names."""
    part = name.split(".")[1] if "." in name else ""
    return part if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists() else None


def objection(stage: str, imported: str) -> str | None:
    """Why a module of `stage` may not import that, or None."""
    top = imported.split(".")[0]
    if top in TORCH and stage not in WITH_TORCH:
        return f"torch belongs to {', '.join(sorted(WITH_TORCH))} alone"
    other = stage_of(imported) if top == "slurm_pt" else None
    if other is None or other == stage:
        return None
    if stage == "devcluster":
        return None if other in DEVCLUSTER_MAY else "devcluster stands alone: only errors"
    if stage in WIRING:
        return None
    if other in WIRING or other == "devcluster":
        return f"{other} wires stages; a stage does not know it"
    if LEVEL[other] > LEVEL[stage]:
        order = " < ".join("/".join(names) for names in LAYERS)
        return f"{other} stands right of {stage} in {order}"
    return None


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_import_goes_to_the_left(path):
    stage = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if stage == "__init__":
        stage = "errors"  # the package itself is left of everything
    assert stage in {*LEVEL, *WIRING, "devcluster"}, f"{path}: {stage} has no place in the layers"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}: {why}"
        for line, name in imports_of(ast.parse(path.read_text()))
        if (why := objection(stage, name))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("stage", "source", "caught"),
    [
        ("plan", "import torch", True),
        ("launch", "def f():\n    from torch.distributed import Store", True),
        ("training", "import torch.nn as nn", False),
        ("launch", "if TYPE_CHECKING:\n    import torch", False),
        ("launch", "if typing.TYPE_CHECKING:\n    pass\nelse:\n    import torch", True),
        ("plan", "from slurm_pt.submit import slurm", True),
        ("plan", "from slurm_pt import submit", True),
        ("submit", "import slurm_pt.launch.attempt", True),
        ("submit", "from slurm_pt.owner import take_ownership", False),
        ("monitor", "from slurm_pt import worker", True),
        ("run_dir", "from slurm_pt import __version__", False),
        ("cli", "from slurm_pt.monitor.status import find_runs", False),
        ("devcluster", "from slurm_pt.run_dir import write_json", True),
        ("monitor", "from slurm_pt.devcluster import wait_until", True),
    ],
)
def test_the_rules_catch_what_they_should(stage, source, caught):
    found = [objection(stage, name) for _, name in imports_of(ast.parse(source))]
    assert any(found) == caught
