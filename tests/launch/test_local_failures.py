"""The word of the local launcher on who failed first, which stands in for srun's."""

from __future__ import annotations

from slurm_pt.launch.after_attempt import ExitRecord, describe_failure
from slurm_pt.launch.local import _note_failures
from tests.builders import make_run


def test_a_rank_that_was_killed_is_named_before_those_that_failed_for_it_f61(tmp_path):
    attempt = make_run(tmp_path).new_attempt()
    _note_failures(attempt, [1, None, -9, 75])
    said = attempt.srun_log.read_text()
    assert said.splitlines() == [
        "local: error: task 2: Killed by signal 9",
        "local: error: task 0: Exited with exit code 1",
    ]
    lost_peer = ExitRecord(0, "here", 1, "RuntimeError: connection closed by peer", 1.0)
    words = describe_failure([lost_peer], 4, -9, said)
    assert words.startswith("rank 2 left no record, so it was killed (local: error: task 2")
