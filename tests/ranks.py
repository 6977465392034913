"""Runs a function on n gloo processes of this machine and collects what each returns.

    results = run_ranks(8, "tests.training.cases:layouts_agree", arguments, deadline_s=120)

The ranks are forked from a process that has torch imported (tests/rank_server.py). The first rank
that fails decides: its traceback is raised here, and the others are killed, by id. Ranks end with
os._exit after a flush, since gloo's threads abort one clean exit in eight. What ranks print is
shown only if some of them end without a word. Benchmarks start their ranks here too.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.rank_server import Call

REPOSITORY = Path(__file__).parent.parent
GRACE_S = 30.0
"""Beyond its deadline, in which the launcher itself kills ranks that are late."""


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time."""


def run_ranks(
    world_size: int,
    function: str,
    *arguments: Any,
    deadline_s: float = 600.0,
    python: str = sys.executable,
    environ: Mapping[str, str] | None = None,
    imports: Sequence[str] = (),
) -> list[Any]:
    """What `function(*arguments)` returned on each rank, rank 0 first.

    It runs with the default process group initialised. Arguments and results are pickled.

    Args:
        function: `package.module:name`.
        deadline_s: After this long the ranks are killed and RankFailedError is raised.
        python: The interpreter, with torch.
        environ: Variables to add.
        imports: Modules to import once, before the ranks are forked.
    """
    own = {**_environment(), **(environ or {})}
    call = Call(world_size, function, arguments, deadline_s, own, tuple(imports))
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps(call))
        _server(python).run(folder, deadline_s + GRACE_S)
        _raise_first_failure(folder, world_size)
        return [
            pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world_size)
        ]


class RankServer:
    """The process that forks launchers of ranks."""

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, "-m", "tests.rank_server"],
            cwd=REPOSITORY,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, folder: Path, timeout_s: float) -> None:
        """The call in `folder`, until its launcher has ended or was killed after `timeout_s`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        launcher = self.process.stdout.readline()
        assert launcher, f"the server of ranks ended with code {self.process.wait()}"
        ended = False
        try:
            ended = bool(select.select([self.process.stdout], [], [], timeout_s)[0])
        finally:  # also when this process is told to stop
            if not ended:
                os.killpg(int(launcher), signal.SIGKILL)  # a group of our ranks alone
            self.process.stdout.readline()

    def close(self) -> None:
        self.process.communicate()


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **ours}


@functools.cache
def _server(python: str) -> RankServer:
    """Started at its first use; it lives as long as this process."""
    server = RankServer(python)
    atexit.register(server.close)
    return server


def _raise_first_failure(folder: Path, world_size: int) -> None:
    failures = sorted(folder.glob("*.failure"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        raise RankFailedError(f"rank {failures[0].stem}:\n{failures[0].read_text()}")
    silent = [rank for rank in range(world_size) if not (folder / f"{rank}.result").exists()]
    if silent:
        said = (folder / "output").read_text(errors="replace")[-2000:]
        raise RankFailedError(
            f"no result of ranks {silent}: killed at the deadline, or died. They said:\n{said}"
        )
