from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from slurm_pt.errors import RunFolderError
from slurm_pt.files import write_json
from slurm_pt.owner import (
    HEARTBEAT_GRACE_S,
    Owner,
    check_ownership,
    heartbeat_age_s,
    pid_start_time,
    read_owner,
    release_ownership,
    take_ownership,
    this_process,
)
from tests.builders import make_run

RUNNING, ENDED, NO_ANSWER = (lambda _: True), (lambda _: False), (lambda _: None)


def owner(**changes) -> Owner:
    record = this_process(job_key=None, restart_count=0)
    return dataclasses.replace(record, **{"pid": 2**22 + 1, "pid_start": "1", **changes})


def beat(run, age_s: float) -> None:
    path = run.heartbeats / "rank_00000.json"
    path.write_text("{}")
    os.utime(path, (time.time() - age_s,) * 2)


def litter(run) -> list[str]:
    return [
        p.name for p in run.path.iterdir() if p.name.startswith(".owner.") and "after" not in p.name
    ]


def test_the_first_owner_is_on_record_and_may_write(tmp_path):
    run = make_run(tmp_path)
    assert read_owner(run) is None
    me = this_process(job_key="7", restart_count=1)
    take_ownership(run, me, job_is_running=RUNNING)
    assert read_owner(run) == me
    check_ownership(run, me.nonce)
    assert litter(run) == []
    assert json.loads(run.owner.read_text())["job_key"] == "7"


@pytest.mark.parametrize(
    ("current", "newcomer", "answer", "heartbeat_s", "sign_of_life"),
    [
        pytest.param({"job_key": "7"}, {"job_key": "8"}, RUNNING, None, "is running", id="job"),
        pytest.param({"job_key": "7"}, {"job_key": "8"}, ENDED, 5, None, id="job ended"),
        pytest.param({"job_key": "7"}, {}, RUNNING, None, "is running", id="job, by hand"),
        pytest.param({"job_key": "7"}, {"job_key": "8"}, NO_ANSWER, 5, "a sign", id="no answer"),
        pytest.param(
            {"job_key": "7"}, {"job_key": "8"}, NO_ANSWER, HEARTBEAT_GRACE_S + 60, None, id="silent"
        ),
        pytest.param({"job_key": "7"}, {"job_key": "8"}, NO_ANSWER, None, None, id="never beat"),
        pytest.param(
            {"job_key": "7"}, {"job_key": "7", "restart_count": 1}, RUNNING, 5, None, id="requeued"
        ),
        pytest.param({"job_key": "7"}, {"job_key": "7"}, RUNNING, 5, None, id="again in a job"),
        pytest.param(
            {"job_key": "7", "pid": os.getpid(), "pid_start": pid_start_time(os.getpid())},
            {"job_key": "7"},
            RUNNING,
            None,
            "is running",
            id="twice in a job",
        ),
        pytest.param(
            {"job_key": "7_1"}, {"job_key": "7_2"}, RUNNING, None, "is running", id="array sibling"
        ),
        pytest.param({"pid": os.getpid()}, {}, ENDED, 5, None, id="a recycled pid"),
        pytest.param(
            {"pid": os.getpid(), "pid_start": pid_start_time(os.getpid())},
            {},
            ENDED,
            None,
            "is running",
            id="local process",
        ),
        pytest.param({}, {}, RUNNING, 5, None, id="local process ended"),
        pytest.param({"host": "elsewhere"}, {}, RUNNING, 5, "a sign", id="another container"),
        pytest.param({"boot_id": "x"}, {}, RUNNING, 5, "a sign", id="another machine"),
        pytest.param({"boot_id": "x"}, {}, RUNNING, 999, None, id="another machine, silent"),
        pytest.param({"job_key": "7", "released": True}, {}, RUNNING, 5, None, id="released"),
    ],
)
def test_a_second_writer_is_refused_while_the_first_lives(
    tmp_path, current, newcomer, answer, heartbeat_s, sign_of_life
):
    run = make_run(tmp_path)
    first, second = owner(**current), owner(nonce="second", **newcomer)
    take_ownership(run, first, job_is_running=answer)
    if heartbeat_s is not None:
        beat(run, heartbeat_s)
    if sign_of_life is None:
        take_ownership(run, second, job_is_running=answer)
        assert read_owner(run) == second
        with pytest.raises(RunFolderError, match="was taken over by"):
            check_ownership(run, first.nonce)
    else:
        with pytest.raises(RunFolderError, match=rf"{sign_of_life}.*slurm-pt cancel"):
            take_ownership(run, second, job_is_running=answer)
        assert read_owner(run) == first
        check_ownership(run, first.nonce)
    assert litter(run) == []


def test_a_released_run_can_be_taken_at_once_and_again(tmp_path):
    run = make_run(tmp_path)
    for number in range(4):
        me = this_process(job_key=str(number), restart_count=0)
        take_ownership(run, me, job_is_running=RUNNING)
        release_ownership(run, me.nonce)
        owner_now = read_owner(run)
        assert owner_now is not None
        assert owner_now.released


def test_releasing_what_another_has_taken_changes_nothing(tmp_path):
    run = make_run(tmp_path)
    first, second = owner(), owner(nonce="second")
    take_ownership(run, first, job_is_running=ENDED)
    take_ownership(run, second, job_is_running=ENDED)
    release_ownership(run, first.nonce)
    assert read_owner(run) == second


def test_an_owner_that_died_before_it_was_on_record_is_passed_over_f37(tmp_path):
    run = make_run(tmp_path)
    dead, killed, last = owner(), owner(nonce="killed"), owner(nonce="last")
    take_ownership(run, dead, job_is_running=ENDED)
    # What is left of a newcomer that was killed between taking the seat and saying so.
    write_json(run.path / f".owner.after.{dead.nonce}", dataclasses.asdict(killed))
    take_ownership(run, last, job_is_running=ENDED)
    assert read_owner(run) == last


def test_a_slow_newcomer_cannot_remove_one_that_was_quicker(tmp_path):
    run = make_run(tmp_path)
    dead, quick, slow = owner(), owner(job_key="8"), owner(nonce="slow", job_key="9")
    dead = dataclasses.replace(dead, job_key="7")
    take_ownership(run, dead, job_is_running=ENDED)

    def quick_one_comes_first(key: str) -> bool:
        if key == "7":  # the slow one has just read that 7 is the owner
            take_ownership(run, quick, job_is_running=ENDED)
            return False
        return key == "8"

    with pytest.raises(RunFolderError, match="belongs to Slurm job 8"):
        take_ownership(run, slow, job_is_running=quick_one_comes_first)
    assert read_owner(run) == quick


def test_a_file_system_without_hard_links_is_told(tmp_path, monkeypatch):
    run = make_run(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RunFolderError, match=r"without hard links .* Set run_root"):
        take_ownership(run, owner(), job_is_running=ENDED)
    assert litter(run) == []


RACE = """
import sys, time
from slurm_pt.errors import RunFolderError
from slurm_pt.owner import take_ownership, this_process
from slurm_pt.run_dir import RunDir
from pathlib import Path
for line in sys.stdin:  # each line is another race
    run = RunDir(Path(line.strip()))
    try:
        take_ownership(run, this_process(job_key=None, restart_count=0),
                       job_is_running=lambda _: False)
        print("won", flush=True)
    except RunFolderError as error:
        assert "is running" in str(error), error
        print("lost", flush=True)
"""


@pytest.mark.parametrize("state", ["free", "dead", "released"])
def test_of_eight_newcomers_at_once_exactly_one_wins(tmp_path, state):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    for race in range(15):
        run = make_run(tmp_path / str(race))
        if state != "free":
            dead = owner(job_key="7")
            take_ownership(run, dead, job_is_running=ENDED)
            if state == "released":
                release_ownership(run, dead.nonce)
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(f"{run.path}\n")
            racer.stdin.flush()
        results = [racer.stdout.readline() for racer in racers if racer.stdout is not None]
        assert sorted(results) == ["lost\n"] * 7 + ["won\n"]
        winner = read_owner(run)
        assert winner is not None
        assert winner.pid == racers[results.index("won\n")].pid
        assert litter(run) == []
    for racer in racers:
        racer.communicate()
        assert racer.returncode == 0


def test_the_age_of_the_newest_heartbeat_counts(tmp_path):
    run = make_run(tmp_path)
    assert heartbeat_age_s(run) is None
    beat(run, 100)
    newer = run.heartbeats / "rank_00001.json"
    newer.write_text("{}")
    os.utime(newer, (time.time() - 10,) * 2)
    age_s = heartbeat_age_s(run)
    assert age_s is not None
    assert 9 < age_s < 60


def test_a_process_is_known_by_its_start_time():
    assert pid_start_time(os.getpid()).isdecimal()
    assert pid_start_time(2**22 + 1) == ""
