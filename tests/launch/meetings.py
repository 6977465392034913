"""Ranks as processes of this machine, for the tests of the rendezvous."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 180.0


class Rank:
    """One rank's process and what it has printed."""

    def __init__(self, spec, prefix=()):
        self.rank = spec["rank"]
        self.records = []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.launch.meeting_process", json.dumps(spec)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, key, pattern=""):
        """The next record with this key, and with text that matches."""
        for line in self.process.stdout:
            self.records.append(json.loads(line))
            if key in self.records[-1] and re.search(pattern, str(self.records[-1][key])):
                return self.records[-1]
        raise AssertionError(f"rank {self.rank} ended without {key!r}: {self.records}")

    def logged(self):
        return "\n".join(record["log"] for record in self.records if "log" in record)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def read_when_there(file):
    """The rendezvous file, once rank 0 has written it."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if file.exists():
            return json.loads(file.read_text())
        time.sleep(0.01)
    raise AssertionError(f"{file} was never written")


def start_last(start, early, last):
    """Starts ranks from (rank, counts, options); the last one when the others wait already.

    Rank 0 stays five seconds after a refusal: on a busy machine a rank may take longer to begin.
    """
    ranks = [start(rank, counts, **options) for rank, counts, options in early]
    for rank in ranks:
        rank.wait_for("begun")
    rank, counts, options = last
    return [*ranks, start(rank, counts, **options)]


def pid_of(rank):
    """The rank's own process: `timeout` stands before it."""
    children = Path(f"/proc/{rank.process.pid}/task/{rank.process.pid}/children").read_text()
    return int(children.split()[0])
