"""Starting ranks that meet."""

from __future__ import annotations

import pytest

from tests.launch.meetings import DEADLINE_S, Rank


@pytest.fixture
def start(tmp_path):
    """Starts ranks of one meeting; all are gone after the test, and none outlives DEADLINE_S."""
    ranks = []

    def start_rank(rank, counts, *, prefix=(), **options):
        spec = {"rank": rank, "counts": counts, "folder": str(tmp_path / "attempt"), **options}
        ranks.append(Rank(spec, ("timeout", "-s", "KILL", str(DEADLINE_S), *prefix)))
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.end()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "attempt" / "rendezvous-k.json"
