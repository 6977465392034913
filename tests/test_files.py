from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt.errors import RunFolderError
from slurm_pt.files import (
    MissingFileError,
    append_json_line,
    find_json,
    read_json,
    read_json_lines,
    write_json,
    write_text,
)

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
from slurm_pt.files import write_json
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
