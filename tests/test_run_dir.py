from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt import run_dir
from slurm_pt.errors import ConfigError, RunFolderError
from slurm_pt.run_dir import (
    MissingFileError,
    RunDir,
    append_json_line,
    create_run,
    find_json,
    open_run,
    read_json,
    read_json_lines,
    run_dir_of,
    write_json,
    write_text,
)
from tests.builders import commit_step, make_point, make_run, read_job, small_config

# Any text that Python can encode, line and paragraph separators included.
TEXTS = st.text(st.characters(codec="utf-8"))


# ------------------------------------------------------------------------------- single files


@given(record=st.dictionaries(TEXTS, TEXTS | st.integers() | st.floats(allow_nan=False)))
def test_a_json_file_reads_back_exactly(tmp_path_factory, record):
    path = tmp_path_factory.getbasetemp() / "one.json"
    write_json(path, record)
    assert read_json(path) == record
    assert find_json(path) == record


def test_a_missing_file_is_none_or_an_error_that_says_so(tmp_path):
    assert find_json(tmp_path / "no.json") is None
    with pytest.raises(MissingFileError, match=r"no\.json is missing.*Submit the run again"):
        read_json(tmp_path / "no.json")


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe{}"])
def test_a_damaged_file_is_told_with_its_path(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    for read in (read_json, find_json):
        with pytest.raises(RunFolderError, match=r"x\.json cannot be read .*remove the file"):
            read(tmp_path / "x.json")


def test_a_file_is_written_with_its_mode_and_leaves_no_temporary_one(tmp_path):
    write_text(tmp_path / "secret", "x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_folder_that_cannot_be_written_is_told_with_what_to_do(tmp_path):
    with pytest.raises(RunFolderError, match=r"a\.json cannot be written: .*set run_root"):
        write_json(tmp_path / "gone" / "a.json", {})


def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"old": True})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"No space left on device\. Free some space"):
        write_json(path, {"old": False})
    assert read_json(path) == {"old": True}
    assert list(tmp_path.iterdir()) == [path]


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from slurm_pt.run_dir import write_json
path, number = Path(sys.argv[1]), 0
while True:
    write_json(path, {"number": number, "padding": "x" * 20000})
    number += 1
    if number == 3: print("ready", flush=True)
"""


def test_a_file_is_whole_whenever_its_writer_is_killed_f42(tmp_path):
    path = tmp_path / "file.json"
    for kill in range(12):
        command = [sys.executable, "-c", WRITE_FOR_EVER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            threading.Event().wait(kill * 0.0007)  # another moment of a write each time
            writer.send_signal(signal.SIGKILL)
        assert read_json(path)["padding"] == "x" * 20000


# ----------------------------------------------------------------------------- logs of records


@given(records=st.lists(st.dictionaries(TEXTS, TEXTS), max_size=4))
def test_a_log_reads_back_whatever_the_records_hold(tmp_path_factory, records):
    path = tmp_path_factory.getbasetemp() / "log.jsonl"
    path.unlink(missing_ok=True)
    for record in records:
        append_json_line(path, record)
    assert list(read_json_lines(path)) == records


def test_a_log_that_is_not_there_is_empty(tmp_path):
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []


def test_a_line_cut_off_by_a_full_disk_takes_no_other_with_it(tmp_path):
    path = tmp_path / "log.jsonl"
    append_json_line(path, {"step": 1})
    with path.open("a") as log:
        log.write('{"step": 2, "lo')
    append_json_line(path, {"step": 3})
    assert [record["step"] for record in read_json_lines(path)] == [1, 3]


def test_lines_that_are_no_records_are_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'1\n[]\nnull\n\xff\n\n{"step": 1}\n')
    assert list(read_json_lines(path)) == [{"step": 1}]


def test_lines_of_many_writers_never_mix(tmp_path):
    path = tmp_path / "log.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: append_json_line(path, {"n": n, "x": "y" * 3000}), range(200)))
    assert sorted(record["n"] for record in read_json_lines(path)) == list(range(200))


# ------------------------------------------------------------------------------------- the run


def test_a_run_is_named_after_its_configuration_and_nothing_is_created(tmp_path):
    point = make_point(tmp_path)
    assert point.run.path.parent == tmp_path
    assert point.run.name.startswith("gpt-")
    assert len(point.run.name) == len("gpt-") + 10
    assert list(tmp_path.iterdir()) == []


def test_a_relative_root_and_a_home_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    cfg = small_config()
    assert run_dir_of(read_job(run_root="runs"), cfg).path.parent == tmp_path / "runs"
    assert run_dir_of(read_job(run_root="~/runs"), cfg).path.parent == Path("/home/me/runs")


@pytest.mark.parametrize("root", ["/a\\b", "/a\nb", "/a\rb"])
def test_a_root_that_slurm_cannot_write_logs_into_is_refused(root):
    with pytest.raises(ConfigError, match=r"run_root=.*backslash.*set another run_root"):
        run_dir_of(read_job(run_root=root), small_config())


def test_creating_a_run_twice_keeps_what_it_has_f37(tmp_path):
    run = make_run(tmp_path)
    run.new_attempt()
    commit_step(run, 5)
    inputs = [path.read_text() for path in (run.config, run.spec, run.plan)]
    assert make_run(tmp_path) == run
    assert [path.read_text() for path in (run.config, run.spec, run.plan)] == inputs
    assert run.committed_step() == 5
    assert len(run.list_attempts()) == 1
    assert open_run(run.path) == run


def test_a_root_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    point = make_point(tmp_path / "file")
    with pytest.raises(RunFolderError, match=r"run_root=.*file: .*cannot be made: Not a dir"):
        create_run(point.run, cfg=point.cfg, spec={}, plan={})


def test_a_folder_without_a_configuration_is_no_run(tmp_path):
    with pytest.raises(RunFolderError, match=r"is not a run folder .*slurm-pt status"):
        open_run(tmp_path)


def test_attempts_are_numbered_from_zero_and_sorted_as_numbers(tmp_path):
    run = make_run(tmp_path)
    assert run.list_attempts() == []
    assert [run.new_attempt().number for _ in range(12)] == list(range(12))
    (run.attempts / "rendezvous").mkdir()
    assert [attempt.number for attempt in run.list_attempts()] == list(range(12))
    assert run.list_attempts()[3].logs.is_dir()
    assert run.list_attempts()[3].exits.is_dir()


def test_a_run_without_folders_has_no_attempts_and_no_step(tmp_path):
    run = RunDir(tmp_path / "none")
    assert run.list_attempts() == []
    assert run.committed_step() == 0
    assert run.read_events() == []
    assert run.read_metrics() == {}


TAKE_ATTEMPTS = """
import sys
from slurm_pt.run_dir import open_run
run = open_run(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(*[run.new_attempt().number for _ in range(20)])
"""


def test_eight_starters_at_once_never_share_an_attempt_f71(tmp_path):
    run = make_run(tmp_path)
    command = [sys.executable, "-c", TAKE_ATTEMPTS, str(run.path)]
    starters = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for starter in starters:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "ready\n"
    for starter in starters:  # all wait at the same line
        assert starter.stdin is not None
        starter.stdin.write("go\n")
        starter.stdin.flush()
    numbers = [int(word) for starter in starters for word in starter.communicate()[0].split()]
    assert sorted(numbers) == list(range(160))
    assert len(run.list_attempts()) == 160


def test_only_committed_checkpoints_count_f45(tmp_path):
    run = make_run(tmp_path)
    commit_step(run, 5)
    commit_step(run, 10)
    (run.checkpoints / "step_30").mkdir()  # no manifest
    (run.checkpoints / "step_40.tmp").mkdir()
    (run.checkpoints / "step_40.tmp" / "manifest.json").write_text("{}")
    assert run.committed_step() == 10


def test_a_step_repeated_after_a_crash_counts_once_with_its_last_record(tmp_path):
    run = make_run(tmp_path)
    for step, loss in [(1, 3.0), (2, 2.0), (2, 2.5), (3, 1.0)]:
        append_json_line(run.metrics, {"step": step, "loss": loss})
    assert {step: m["loss"] for step, m in run.read_metrics().items()} == {1: 3.0, 2: 2.5, 3: 1.0}


def test_events_have_a_time_and_can_be_chosen_by_kind(tmp_path):
    run = make_run(tmp_path)
    run.record_event("submitted", job_key="7")
    run.record_event("resumed", step=3)
    (event,) = run.read_events("resumed")
    assert event["step"] == 3
    assert event["time"] > 1.7e9
    assert [e["event"] for e in run.read_events()] == ["submitted", "resumed"]


def test_every_file_that_a_run_leaves_is_text_that_a_person_can_read(tmp_path):
    run = make_run(tmp_path)
    run.record_event("résumé")
    assert "résumé" in run.events.read_text()
    assert json.loads(run.plan.read_text())["layout"] == {"tp": 1, "pp": 1, "dp": 1}
    assert "hidden_size: 64" in run.config.read_text()
    assert run_dir.RunDir(run.path).name == run.name
