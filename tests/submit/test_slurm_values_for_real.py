"""The tables of tests/config against sbatch itself, with held jobs: same meaning, same refusals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from slurm_pt.config.slurm_values import parse_memory_mib, parse_time_limit_s
from tests.config import slurm_tables as tables

pytestmark = pytest.mark.slurm


def submit_held(bench, option: str, text: str) -> str | None:
    """The id of a held job with that value; None if sbatch refuses it."""
    command = ["sbatch", "--parsable", "--hold", f"--{option}={text}", "--wrap=true"]
    ran = bench.cluster.run(command, check=False, cwd=bench.folder)
    if ran.returncode != 0:
        assert "Invalid" in ran.stderr, ran.stderr
        return None
    return bench.note(ran.stdout.strip())


def understood(bench, option: str, texts: list[str], field: str) -> dict[str, str | None]:
    """What Slurm made of each text; None where it was refused."""
    with ThreadPoolExecutor(4) as pool:
        ids = pool.map(lambda text: submit_held(bench, option, text), texts)
        jobs = dict(zip(texts, ids, strict=True))
    rows = bench.cluster.run(["squeue", "-h", "-o", f"%i {field}"]).stdout.splitlines()
    shown = dict(row.split() for row in rows)
    return {text: job and shown[job] for text, job in jobs.items()}


def test_memory_means_the_same_to_sbatch_f94(bench):
    accepted = understood(bench, "mem", [*tables.MEMORY], "%m")
    assert {t: shown and parse_memory_mib(shown) for t, shown in accepted.items()} == tables.MEMORY


def test_memory_that_we_refuse_is_refused_by_sbatch_f94(bench):
    refused = understood(bench, "mem", tables.MEMORY_REFUSED, "%m")
    assert set(refused.values()) == {None}, refused
    lenient = understood(bench, "mem", tables.MEMORY_ONLY_SLURM_TAKES, "%m")
    assert None not in lenient.values(), lenient


def test_time_means_the_same_to_sbatch_f95(bench):
    accepted = understood(bench, "time", [*tables.TIME_S], "%l")
    assert None not in accepted.values()
    assert {t: parse_time_limit_s(shown or "") for t, shown in accepted.items()} == tables.TIME_S


def test_time_that_we_refuse_is_refused_or_misread_by_sbatch_f95(bench):
    refused = understood(bench, "time", tables.TIME_REFUSED, "%l")
    assert set(refused.values()) == {None}, refused
    misread = understood(bench, "time", tables.TIME_ONLY_SLURM_TAKES, "%l")
    assert None not in misread.values(), misread
