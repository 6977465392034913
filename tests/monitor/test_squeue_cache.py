from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from slurm_pt.monitor.squeue_cache import ask_squeue

SQUEUE = """#!/bin/sh
echo asked >> "$CALLS"
[ -e "$CALLS.silent" ] && { echo "slurm_load_jobs error: Unable to contact" >&2; exit 1; }
echo "7|7|RUNNING|N/A|N/A|1:00|1|None"
"""


@pytest.fixture
def counted_squeue(tmp_path, monkeypatch):
    """A squeue that counts how often it is asked; the real one is asked in tests/submit."""
    for name, text in (("squeue", SQUEUE), ("sbatch", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return lambda: len(calls.read_text().splitlines()) if calls.exists() else 0


def test_a_young_answer_is_used_again_and_an_old_one_is_not(counted_squeue, tmp_path):
    assert ask_squeue(max_age_s=60).jobs == ask_squeue(max_age_s=60).jobs
    assert counted_squeue() == 1
    (cache,) = (tmp_path / "runtime").glob("squeue-*.json")
    os.utime(cache, (time.time() - 90,) * 2)
    answer = ask_squeue(max_age_s=60)
    assert answer.jobs is not None
    assert answer.jobs["7"].state == "RUNNING"
    assert counted_squeue() == 2


def test_many_terminals_at_once_ask_once(counted_squeue):
    code = (
        "from slurm_pt.monitor.squeue_cache import ask_squeue\n"
        "print(len(ask_squeue(max_age_s=60).jobs))"
    )
    terminals = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(5)
    ]
    assert {terminal.communicate()[0] for terminal in terminals} == {b"1\n"}
    assert counted_squeue() == 1


def test_no_answer_is_none_with_a_note_and_is_not_kept_f80(counted_squeue, tmp_path):
    (tmp_path / "calls.silent").write_text("")
    answer = ask_squeue(max_age_s=60)
    assert answer.jobs is None
    assert "states unknown" in answer.note
    assert "Unable to contact" in answer.note
    (tmp_path / "calls.silent").unlink()
    assert ask_squeue(max_age_s=60).jobs is not None


@pytest.mark.parametrize("content", ["", "[1]", '[{"job_key": "7"}]', "\x00"])
def test_a_damaged_cache_is_asked_anew(counted_squeue, tmp_path, content):
    ask_squeue(max_age_s=60)
    (cache,) = (tmp_path / "runtime").glob("squeue-*.json")
    cache.write_text(content)
    assert ask_squeue(max_age_s=60).jobs is not None
    assert counted_squeue() == 2


def test_another_cluster_has_a_cache_of_its_own(counted_squeue, monkeypatch):
    ask_squeue(max_age_s=60)
    monkeypatch.setenv("SLURM_CONF", "/other/slurm.conf")
    ask_squeue(max_age_s=60)
    assert counted_squeue() == 2


@pytest.mark.parametrize("runtime", ["", "/run/user/4000000000"])
def test_without_a_runtime_folder_the_cache_is_private_in_the_shared_one(
    counted_squeue, tmp_path, monkeypatch, runtime
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime and str(tmp_path / "no" / "such"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ask_squeue(max_age_s=60)
    folder = tmp_path / f"slurm_pt-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.glob("squeue-*.json"))


def test_without_any_place_for_a_cache_slurm_is_asked_each_time(
    counted_squeue, tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"slurm_pt-{os.getuid()}").write_text("in the way")
    assert ask_squeue(max_age_s=60).jobs is not None
    ask_squeue(max_age_s=60)
    assert counted_squeue() == 2


def test_where_there_is_no_slurm_nothing_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = ask_squeue(max_age_s=60)
    assert answer.jobs is None  # which is not "no jobs"
    assert "no Slurm here" in answer.note
