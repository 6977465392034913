from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt import __version__
from slurm_pt.plan import make_plan
from slurm_pt.submit.script import JobSpec, make_job_spec, quote_directive, render_script
from tests.builders import read_small

GOLDEN = Path(__file__).parent / "golden"

EVERYTHING = {
    "parallel__tp": 2,
    "parallel__dp": 4,
    "train__global_batch_size": 16,
    "slurm__partition": "gpu",
    "slurm__qos": "low",
    "slurm__account": "lab",
    "slurm__nodes": 2,
    "slurm__gpus_per_node": 4,
    "slurm__cpus_per_task": 6,
    "slurm__mem": "64G",
    "slurm__time": "1-12:00:00",
    "slurm__constraint": "a100&nvlink",
    "slurm__reservation": "maintenance",
    "slurm__nodelist": "n[1-4]",
    "slurm__exclude": "n3",
    "slurm__exclusive": True,
    "slurm__dependency": "afterok:12",
    "slurm__job_name": 'it\'s "my" run',
    "slurm__signal_lead_s": 300,
    "slurm__cpu_bind": "cores",
    "slurm__setup": ["module load cuda", "export NCCL_DEBUG=INFO"],
    "slurm__additional_parameters": {
        "mail_type": "END",
        "comment": "50% of $HOME",
        "overcommit": True,
        "spread-job": False,
        "licenses": None,
    },
    "slurm__python": "/opt/my env/bin/python",
}
CASES = {
    "smallest": ({"slurm__python": "/venv/bin/python"}, ["/shared/runs/gpt-0123456789"]),
    "everything": (EVERYTHING, ["/shared/my runs/50%/gpt-0123456789"]),
    "array": (
        {"slurm__python": "/venv/bin/python", "slurm__array_parallelism": 2},
        ["/shared/runs/gpt-0", "/shared/runs/gpt-1", "/shared/runs/gpt-2"],
    ),
}


def spec_of(**asked) -> JobSpec:
    config = read_small(**asked)
    return make_job_spec(config, make_plan(config))


def render(case: str) -> str:
    asked, runs = CASES[case]
    paths = tuple(Path(run) for run in runs)
    pattern = "slurm-%A_%a.out" if len(runs) > 1 else "slurm-%j.out"
    folder = paths[0].parent / "sweeps" / "20260101"
    manifest = folder / "runs.txt"
    text = render_script(spec_of(**asked), paths, log=folder / pattern, manifest=manifest)
    return text.replace(f"slurm_pt {__version__};", "slurm_pt VERSION;")


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_the_recorded_one(case):
    text, golden = render(case), GOLDEN / f"{case}.sbatch"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(text)
    assert text == golden.read_text(), (
        f"{golden} differs. Read the difference; to accept it: "
        "UPDATE_GOLDEN=1 python -m pytest tests/submit/test_script.py, then commit the file"
    )


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_valid_bash(case):
    checked = subprocess.run(["bash", "-n"], input=render(case), text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_nothing_is_written_that_was_not_set_f96():
    options = dict(spec_of().options)
    assert set(options) == {
        *("job-name", "nodes", "ntasks", "ntasks-per-node"),
        *("signal", "requeue", "open-mode"),
    }
    assert options["job-name"] == "gpt"


def test_requeue_and_appended_logs_are_always_asked_for_f32_f34():
    options = dict(spec_of().options)
    assert options["requeue"] is None
    assert options["open-mode"] == "append"


@pytest.mark.parametrize("form", ["mem", "mem_per_cpu", "mem_per_gpu"])
def test_memory_is_written_in_the_one_form_that_was_set_f96(form):
    options = dict(spec_of(**{f"slurm__{form}": "4G"}).options)
    written = {name: value for name, value in options.items() if name.startswith("mem")}
    assert written == {form.replace("_", "-"): "4G"}


def test_cpus_per_task_stand_on_sruns_line_too_f19():
    assert "--cpus-per-task=6" in spec_of(**EVERYTHING).srun_options
    assert not any("cpus-per-task" in option for option in spec_of().srun_options)


def test_binding_has_a_safe_default_f20():
    assert "--cpu-bind=none" in spec_of().srun_options


def test_gpus_are_asked_for_by_node_and_unbound_f14():
    options = dict(spec_of(slurm__gpus_per_node=4, parallel__dp=4).options)
    assert options["gpus-per-node"] == "4"
    assert not any(name.startswith("gpus-per-task") for name in options)
    own = dict(spec_of(slurm__gpus_per_node=4, slurm__gres="gpu:a100:4", parallel__dp=4).options)
    assert own["gres"] == "gpu:a100:4"
    assert "gpus-per-node" not in own


def test_runs_that_ask_for_the_same_have_equal_specs():
    assert spec_of(train__lr=1e-3) == spec_of(train__lr=1e-4)
    assert hash(spec_of(slurm__mem="1G")) != hash(spec_of(slurm__mem="2G"))


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("gpt-1", "gpt-1"),
        ("1-12:00:00", "1-12:00:00"),
        ("afterok:1:2", "afterok:1:2"),
        ("", '""'),
        ("my run", '"my run"'),
        ("it's", '"it\'s"'),
        ('a"b', '"a\\"b"'),
        ("a\\b", '"a\\\\b"'),
        ("#x", '"#x"'),
        ("名前", '"名前"'),
    ],
)
def test_a_value_becomes_one_word_of_a_directive_f101(value, word):
    assert quote_directive(value) == word


def read_as_sbatch_does(line: str) -> list[str]:
    """The words of a #SBATCH line, by the rules of sbatch's own source (opt.c, 22.05)."""
    words, word, quote, escaped, inside = [], "", "", False, False
    for sign in line:
        if escaped:
            word, escaped = word + sign, False
        elif sign == "\\":
            escaped = inside = True
        elif quote:
            quote, word = ("", word) if sign == quote else (quote, word + sign)
        elif sign in "'\"":
            quote, inside = sign, True
        elif sign.isspace():
            words, word, inside = ([*words, word] if inside else words), "", False
        else:
            word, inside = word + sign, True
    assert not quote
    return [*words, word] if inside else words


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"])))
def test_any_value_reads_back_as_one_word_f101(value):
    line = f"--job-name={quote_directive(value)} --hold"
    assert read_as_sbatch_does(line) == [f"--job-name={value}", "--hold"]


FAKE_PYTHON = """#!/bin/bash
# Stands in for the interpreter: notes how it was called, and answers as slurm_pt would.
for word in "$@"; do printf '%s\\0' "$word" >> "$CALLS"; done
printf '\\n' >> "$CALLS"
case "$*" in
  *"attempt begin"*)
    mkdir -p "$4/attempts/0/logs"
    printf '%s' "$BEGIN_SAYS"
    exit $BEGIN_CODE ;;
  *"attempt end"*) exit $END_CODE ;;
esac
"""
FAKE_SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do printf '%s\\0' "$1" >> "$CALLS.srun"; shift; done
echo "srun: error: said" >&2
"$@"
exit $SRUN_CODE
"""


def run_script(
    folder: Path,
    *,
    begin: str = "yes",
    begin_code: int = 0,
    srun_code: int = 0,
    end_code: int = 0,
    runs: int = 1,
    task: int = 0,
    setup: tuple[str, ...] = (),
) -> tuple[int, list[list[str]], Path]:
    """Runs a rendered script under bash with stand-ins for python and srun."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("python x", FAKE_PYTHON), ("srun", FAKE_SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    paths = tuple(folder / f"gpt-{number}" for number in range(runs))
    (folder / "runs.txt").write_text("".join(f"{path}\n" for path in paths))
    attempt = paths[task] / "attempts" / "0"
    spec = spec_of(slurm__python=str(folder / "python x"), slurm__setup=list(setup))
    text = render_script(spec, paths, log=folder / "x.out", manifest=folder / "runs.txt")
    environ = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "CALLS": str(folder / "calls"),
        "BEGIN_SAYS": str(attempt) if begin == "yes" else "",
        "BEGIN_CODE": str(begin_code),
        "SRUN_CODE": str(srun_code),
        "END_CODE": str(end_code),
        "SLURM_ARRAY_TASK_ID": str(task),
    }
    ran = subprocess.run(
        ["bash", "-c", text], env=environ, cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.stderr == ""
    calls = (folder / "calls").read_text().splitlines()
    return ran.returncode, [call.split("\0")[:-1] for call in calls], attempt


NASTY = '50%j of $HOME `id` it\'s "q"'


def test_the_script_begins_an_attempt_starts_the_ranks_and_ends_it(tmp_path):
    folder = tmp_path / NASTY
    code, calls, attempt = run_script(folder, srun_code=7, end_code=75)
    run = str(folder / "gpt-0")
    assert calls[0][-2] == "--pid"  # of the batch shell, which lives as long as the attempt
    del calls[0][-2:]
    assert calls == [
        ["-m", "slurm_pt.launch.attempt", "begin", run],
        ["-u", "-m", "slurm_pt.worker", run],
        ["-m", "slurm_pt.launch.attempt", "end", str(attempt), "--srun-code", "7"],
    ]
    assert code == 75  # the end's code, not srun's
    assert (attempt / "srun.log").read_text() == "srun: error: said\n"
    options = (folder / "calls.srun").read_text().split("\0")[:-1]
    pattern = str(attempt).replace("%", "%%") + "/logs/rank_%t.log"
    assert options == [*spec_of().srun_options, f"--output={pattern}", "--open-mode=append"]
    assert "--kill-on-bad-exit=1" in options


def test_a_task_of_an_array_takes_its_own_line(tmp_path):
    _, calls, _ = run_script(tmp_path / NASTY, runs=3, task=1)
    assert calls[0][3] == str(tmp_path / NASTY / "gpt-1")


def test_a_finished_run_ends_the_script_at_once_and_well(tmp_path):
    code, calls, _ = run_script(tmp_path, begin="no")
    assert code == 0
    assert len(calls) == 1


def test_a_run_that_cannot_be_taken_ends_the_script_with_that_code(tmp_path):
    code, calls, _ = run_script(tmp_path, begin="no", begin_code=2)
    assert code == 2
    assert len(calls) == 1


def test_a_strict_shell_among_the_setup_lines_does_not_skip_the_end(tmp_path):
    code, calls, _ = run_script(tmp_path, srun_code=7, end_code=75, setup=("set -euo pipefail",))
    assert calls[-1][-2:] == ["--srun-code", "7"]
    assert code == 75


def test_the_last_line_decides_not_an_echo_after_it_f75(tmp_path):
    assert run_script(tmp_path, srun_code=0, end_code=3)[0] == 3
