"""Runs a function on n gloo processes of this machine and collects what each returns.

    results = run_ranks(8, "tests.training.cases:layouts_agree", arguments, deadline_s=120)

One launcher process imports torch once and forks the ranks: eight ranks start in about two
seconds, where eight interpreters took 14. The first rank that fails decides: its traceback is
raised here, and the others are killed, by id. Ranks end with os._exit after a flush, since
gloo's threads abort one clean exit in eight. What ranks print is shown only if some of them end
without a word. Benchmarks start their ranks here too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent


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
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        call = (world_size, function, arguments, deadline_s, tuple(imports))
        (folder / "call").write_bytes(pickle.dumps(call))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "GLOO_SOCKET_IFNAME": "lo",
            **(environ or {}),
        }
        with (folder / "output").open("wb") as output:
            launcher = subprocess.Popen(
                [python, "-m", "tests.ranks", name],
                cwd=REPOSITORY,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout=deadline_s + 30.0)
            finally:  # also when this process is told to stop
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)  # a session of our ranks alone
                    launcher.wait()
        _raise_first_failure(folder, world_size)
        return [
            pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world_size)
        ]


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


def _launch(folder: Path) -> None:
    """The launcher process: fork the ranks, wait for them, kill what is left."""
    call = pickle.loads((folder / "call").read_bytes())
    world_size, function, arguments, deadline_s, imports = call
    # Once, before the fork. torch.optim imports _dynamo at its first use, which takes seconds.
    for module in ("torch._dynamo", function.partition(":")[0], *imports):
        importlib.import_module(module)
    store = folder / "store"
    ranks: dict[int, int] = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, world_size, folder, store, function, arguments, deadline_s)
        ranks[pid] = rank
    end = time.monotonic() + deadline_s
    while ranks and time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            continue
        rank = ranks.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            if not list(folder.glob("*.failure")):
                (folder / f"{rank}.failure").write_text(f"ended with code {code}, said nothing")
            break
    if ranks and not list(folder.glob("*.failure")):
        slow = ", ".join(str(rank) for rank in sorted(ranks.values()))
        (folder / f"{slow}.failure").write_text(f"did not end within {deadline_s} s")
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run_rank(
    rank: int,
    world_size: int,
    folder: Path,
    store: Path,
    function: str,
    arguments: tuple[Any, ...],
    deadline_s: float,
) -> None:
    """One forked rank; never returns."""
    import torch.distributed as dist

    code = 1
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=deadline_s),
        )
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(*arguments)
        dist.barrier()
        temporary = folder / f"{rank}.result.tmp"
        temporary.write_bytes(pickle.dumps(result))
        temporary.rename(folder / f"{rank}.result")
        dist.destroy_process_group()
        code = 0
    except BaseException:
        temporary = folder / f"{rank}.failure.tmp"
        temporary.write_text(traceback.format_exc())
        temporary.rename(folder / f"{rank}.failure")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _launch(Path(sys.argv[1]))
