from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import slurm_pt

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", slurm_pt.__all__)
def test_every_public_name_is_there(name):
    assert getattr(slurm_pt, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = slurm_pt.trian  # type: ignore[attr-defined]


def test_every_package_on_disk_is_in_the_wheel():
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    found = {
        "slurm_pt" if path.parent.name == "slurm_pt" else f"slurm_pt.{path.parent.name}"
        for path in (ROOT / "slurm_pt").glob("**/*.py")
        if "hydra_plugins" not in path.parts
    }
    assert found <= listed


def test_the_version_is_the_same_everywhere():
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["version"]
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None, "CHANGELOG.md has no heading such as `## [0.1.0]`"
    assert slurm_pt.__version__ == declared == newest[1]
    assert importlib.metadata.version("slurm_pt") == declared, "run `make setup` again"


def test_no_module_of_ours_takes_the_place_of_a_public_name():
    # Importing slurm_pt.x sets the attribute x of the package, whatever it was before.
    modules = {path.stem for path in (Path(slurm_pt.__file__).parent).iterdir()}
    assert not modules & set(slurm_pt.__all__)
