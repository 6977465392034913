"""The documentation names what there is, and its commands and links work."""

import dataclasses
import re
import shlex
import typing
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_pt.cli import main
from slurm_pt.config import RunConfig

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *REPOSITORY.glob("docs/*.md")]


def test_every_configuration_key_is_documented_and_no_other():
    text = (REPOSITORY / "docs" / "configuration.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for group, hint in typing.get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(hint):
            documented = re.findall(r"^\| `(\w+)` \|", sections[group], re.MULTILINE)
            assert documented == [field.name for field in dataclasses.fields(hint)], group


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_of_slurm_pt_exist(page):
    for line in re.findall(r"slurm-pt ([^`\n\"|]+)", page.read_text()):
        words = shlex.split(line.split("#")[0].replace("\\", ""))
        command = [word for word in words[:2] if re.fullmatch(r"[a-z][a-z-]*", word)]
        shown = CliRunner().invoke(main, [*command, "--help"])
        assert shown.exit_code == 0, f"{line}: {shown.output}"
        for option in re.findall(r"--[a-z-]+", line):
            assert option in shown.output, line
