"""Checkpoint folders: commit, damage of every kind, pruning, and KILL at any moment."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from slurm_pt.checkpoint import store
from slurm_pt.checkpoint.store import FileRecord, Manifest
from slurm_pt.errors import CheckpointError


def commit_step(folder, step, *, content=b"weights of a step", names=("a.bin", "b.bin")):
    """What a save does, by one process; None when the step was there already."""
    temporary = store.prepare(folder, step)
    if temporary is None:
        return None
    files = {name: store.write_file(temporary / name, content) for name in names}
    manifest = Manifest(
        step=step,
        layout={"tp": 1, "pp": 1, "dp": 1},
        world_size=1,
        versions={},
        time="2026-11-30T12:00:00+00:00",
        files=files,
        common={"step": step},
    )
    return store.commit(temporary, manifest)


def no_look(path):
    """Trusts manifests and sizes."""
    del path


def newest_usable(folder, find_damage=store.find_damage):
    told = []
    found, skipped = store.newest_usable(store.list_checkpoints(folder), find_damage, told.append)
    assert told == skipped
    return found, skipped


def steps(folder):
    return [stored.step for stored in store.list_checkpoints(folder)]


def test_a_committed_checkpoint_is_found_without_any_pointer_file(tmp_path):
    """F45."""
    commit_step(tmp_path, 2)
    path = commit_step(tmp_path, 10)
    found, skipped = newest_usable(tmp_path)
    assert (found.step, found.path, skipped) == (10, path, [])
    assert path.name == "step_00000010"
    assert store.read_manifest(path).common == {"step": 10}


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path):
    assert newest_usable(tmp_path / "not there") == (None, [])
    (tmp_path / "step_00000001.tmp").mkdir()
    assert newest_usable(tmp_path) == (None, [])


def flip_a_bit(path):
    data = bytearray((path / "b.bin").read_bytes())
    data[3] ^= 16
    (path / "b.bin").write_bytes(data)


def newer_version(path):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format_version"] = 2
    (path / "manifest.json").write_text(json.dumps(manifest))


def empty(path):
    for file in path.iterdir():
        file.unlink()


WHOLE = hashlib.sha256(b"weights of a step").hexdigest()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        # b"weights of a step" has 17 bytes.
        pytest.param(
            lambda path: os.truncate(path / "b.bin", 5),
            "b.bin has 5 bytes, expected 17",
            id="truncated",
        ),
        pytest.param(flip_a_bit, f", expected {WHOLE}", id="bit flipped"),
        pytest.param(
            lambda path: (path / "b.bin").unlink(),
            "b.bin cannot be read: No such file or directory; expected 17 bytes",
            id="file missing",
        ),
        pytest.param(
            lambda path: (path / "manifest.json").unlink(),
            "manifest.json is missing",
            id="manifest missing",
        ),
        pytest.param(
            lambda path: os.truncate(path / "manifest.json", 40),
            "manifest.json cannot be read",
            id="manifest truncated",
        ),
        pytest.param(
            lambda path: (path / "manifest.json").write_text('{"format_version": 1}'),
            "manifest.json is not a manifest",
            id="manifest of something else",
        ),
        pytest.param(empty, "manifest.json is missing", id="empty folder"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(tmp_path, damage, message):
    """F47: file, expected and found, and what is used instead."""
    commit_step(tmp_path, 1)
    damage(commit_step(tmp_path, 2))
    found, skipped = newest_usable(tmp_path)
    assert found.step == 1
    (reason,) = store.describe_skipped(skipped, found)
    assert reason.startswith("step_00000002: ")
    assert message in reason
    assert reason.endswith("; used instead: step_00000001")


def test_checkpoints_of_which_none_can_be_used_are_never_a_fresh_start(tmp_path):
    """F45."""
    for step in (1, 2):
        os.truncate(commit_step(tmp_path, step) / "a.bin", 1)
    with pytest.raises(CheckpointError) as raised:
        newest_usable(tmp_path, find_damage=no_look)
    assert "step_00000001: a.bin has 1 bytes, expected 17" in str(raised.value)
    assert "step_00000002" in str(raised.value)


def test_a_newer_format_is_refused_by_name_and_not_passed_over(tmp_path):
    commit_step(tmp_path, 1)
    path = commit_step(tmp_path, 2)
    newer_version(path)
    with pytest.raises(store.NewerFormatError, match=r"step_00000002: .* format version 2"):
        newest_usable(tmp_path)
    with pytest.raises(store.NewerFormatError):
        store.prepare(tmp_path, 2)
    assert store.prune(tmp_path, keep_last=1) == []
    assert path.exists()


def test_a_committed_step_is_not_written_again(tmp_path):
    """F45: not even by a run that started from nothing."""
    commit_step(tmp_path, 3, content=b"first")
    assert commit_step(tmp_path, 3, content=b"other") is None
    assert (tmp_path / "step_00000003" / "a.bin").read_bytes() == b"first"


def test_a_commit_cannot_replace_a_step_that_appeared_meanwhile(tmp_path):
    temporary = store.prepare(tmp_path, 3)
    temporary.rename(tmp_path / "elsewhere.tmp")
    commit_step(tmp_path, 3, content=b"first")
    (tmp_path / "elsewhere.tmp").rename(temporary)
    manifest = Manifest(3, {}, 1, {}, "", {})
    with pytest.raises(OSError, match="not empty"):
        store.commit(temporary, manifest)
    assert (tmp_path / "step_00000003" / "a.bin").read_bytes() == b"first"


def test_a_damaged_step_makes_way_when_its_step_is_saved_again(tmp_path):
    path = commit_step(tmp_path, 3)
    for number in (1, 2):
        os.truncate(path / "a.bin", 1)
        assert commit_step(tmp_path, 3) is not None
        assert (tmp_path / f"step_00000003.damaged-{number}" / "a.bin").stat().st_size == 1
    assert steps(tmp_path) == [3]
    assert newest_usable(tmp_path)[1] == []


def test_clean_removes_what_dead_attempts_left_and_nothing_else(tmp_path):
    commit_step(tmp_path, 1)
    for name in ("step_00000002.tmp", ".pruned-step_00000000", "step_00000003.damaged-1", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000002.tmp" / "half").write_bytes(b"x")
    store.clean(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["mine", "step_00000001", "step_00000003.damaged-1"]
    store.clean(tmp_path / "not there")


def test_prune_keeps_the_newest(tmp_path):
    for step in range(1, 6):
        commit_step(tmp_path, step)
    assert sorted(store.prune(tmp_path, keep_last=2)) == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]
    with pytest.raises(ValueError, match="keep_last"):
        store.prune(tmp_path, keep_last=0)


@pytest.mark.parametrize("damage", [flip_a_bit, empty])
def test_prune_deletes_nothing_while_the_newest_is_damaged(tmp_path, damage):
    """F44: the last good one is never deleted for one that cannot be used."""
    commit_step(tmp_path, 1)
    commit_step(tmp_path, 2)
    damage(commit_step(tmp_path, 3))
    assert store.prune(tmp_path, keep_last=1) == []
    assert steps(tmp_path) == [3, 2, 1]


def test_prune_counts_only_usable_checkpoints(tmp_path):
    for step in (1, 2, 3, 4):
        commit_step(tmp_path, step)
    empty(tmp_path / "step_00000003")
    assert store.prune(tmp_path, keep_last=2) == [1]
    assert steps(tmp_path) == [4, 3, 2]


def test_ranks_can_share_the_verification_of_one_checkpoint(tmp_path):
    path = commit_step(tmp_path, 1)
    flip_a_bit(path)
    assert store.verify_files(path, ["a.bin"]) == []
    assert len(store.verify_files(path, ["a.bin", "b.bin"])) == 1
    assert store.verify_files(path, ["c.bin"]) == ["c.bin is not in manifest.json"]


def test_the_login_node_reads_checkpoints_without_torch(tmp_path):
    commit_step(tmp_path, 4)
    program = (
        "import sys, pathlib; from slurm_pt.checkpoint import store;"
        f"stored, = store.list_checkpoints(pathlib.Path({str(tmp_path)!r}));"
        "print(stored.step, store.find_damage(stored.path));"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "4 None\n"), done.stderr


def test_file_records_are_of_what_is_on_disk(tmp_path):
    record = store.write_file(tmp_path / "x", b"abc")
    # The well-known SHA-256 of "abc" (FIPS 180-4, example 1).
    assert record == FileRecord(
        3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def write_for_ever(folder):
    """A writer that keeps one checkpoint, from the newest on; only a KILL ends it."""
    store.clean(folder)
    found, _ = newest_usable(folder, find_damage=no_look)
    step = found.step if found else 0
    while True:
        step += 1
        commit_step(folder, step, content=step.to_bytes(4, "little") * 5000)
        store.prune(folder, keep_last=1)


def test_after_a_kill_at_any_moment_a_complete_checkpoint_loads(tmp_path):
    """F42, F44: 150 rounds, keep_last=1, at moments all over save, commit and prune."""
    seeded = random.Random(42)
    last, left_over = 1, 0
    commit_step(tmp_path, 1, content=(1).to_bytes(4, "little") * 5000)
    for _ in range(150):
        pid = os.fork()
        if pid == 0:
            try:
                write_for_ever(tmp_path)
            finally:
                os._exit(1)
        time.sleep(seeded.uniform(0.001, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found, skipped = newest_usable(tmp_path)
        assert skipped == []  # not only something loads: nothing half-done has a committed name
        assert found.step >= last
        assert (found.path / "a.bin").read_bytes() == found.step.to_bytes(4, "little") * 5000
        left_over += len(list(tmp_path.iterdir())) > 1
        last = found.step
    # The kills did hit: work was done between them, and was cut off.
    assert last > 20
    assert left_over > 20
