"""How the process of a rank begins and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import make_run

REPOSITORY = Path(__file__).parents[1]


def run_python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "code"), [("return 1", 0), ("raise ValueError('no')", 1), ("sys.exit(7)", 7)]
)
def test_with_torch_loaded_a_process_ends_without_pulling_the_interpreter_down(body, code):
    """Gloo's threads abort some interpreters that shut down: none is shut down."""
    ended = run_python(
        "-c",
        f"""
import atexit, os, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # the name is all that is looked for
atexit.register(lambda: os._exit(99))
from slurm_pt.program import run_program

def program(cfg):
    print("it was here")
    {body}

run_program(program, None, exits=True)
""",
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == "it was here\n"  # also what was not flushed


PROGRAM = """
import multiprocessing, os


def say_where(answers):
    answers.put(__name__)


def main(cfg):
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    child = spawn.Process(target=say_where, args=(answers,))
    child.start()
    print("child ran", answers.get(timeout=60), "of", __name__)
    child.join()
    print("extensions in", os.environ["TORCH_EXTENSIONS_DIR"])


if __name__ == "__main__":
    raise SystemExit("a rank ran the program's file as a script")
"""


@pytest.fixture
def attempt(tmp_path):
    """An attempt of a run whose program is a file."""
    program = tmp_path / "my_program.py"
    program.write_text(PROGRAM)
    run = make_run(tmp_path, entry={"file": str(program), "function": "main"})
    return run.new_attempt()


def start_rank(attempt, **environ):
    run = str(attempt.path.parents[1])
    return run_python(
        "-m", "slurm_pt.worker", run, SLURM_PT_ATTEMPT_DIR=str(attempt.path), **environ
    )


def test_a_program_is_imported_so_that_what_it_spawns_can_import_it_again(attempt):
    ended = start_rank(attempt)
    assert ended.returncode == 0, ended.stderr
    assert "child ran my_program of my_program" in ended.stdout


def test_an_attempt_compiles_extensions_where_no_killed_one_left_a_lock(attempt):
    assert f"extensions in {attempt.path}/torch_extensions" in start_rank(attempt).stdout
    chosen = start_rank(attempt, TORCH_EXTENSIONS_DIR="/of/the/user").stdout
    assert "extensions in /of/the/user" in chosen
