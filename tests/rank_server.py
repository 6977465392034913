"""The process that ranks are forked from: `python -m tests.rank_server`, one for each interpreter.

It imports torch once. For each folder that it reads from its input it forks a launcher, whose id
it prints, and prints `ended` when that is gone. The launcher forks the ranks of one call, waits
for them and kills what is left. So eight ranks start in half a second, where eight interpreters
took 14. The server ends when its input does, with the process that started it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call of a function on ranks; pickled into the file `call` of its folder."""

    world_size: int
    function: str
    arguments: tuple[Any, ...]
    deadline_s: float
    environ: dict[str, str]
    """The whole of it: that of the caller at the time of the call."""
    imports: tuple[str, ...]


def serve() -> None:
    # torch.optim imports _dynamo at its first use, which takes seconds.
    importlib.import_module("torch._dynamo")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            _launch(Path(line.strip()))
        os.setpgid(pid, pid)  # by both, so that it has happened when either goes on
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


def _launch(folder: Path) -> None:
    """The launcher: fork the ranks, wait for them, kill what is left; never returns."""
    try:
        _redirect(folder / "output")
        call: Call = pickle.loads((folder / "call").read_bytes())
        os.environ.clear()
        os.environ.update(call.environ)
        for module in (call.function.partition(":")[0], *call.imports):
            importlib.import_module(module)  # once, before the fork
        _fork_ranks(folder, call)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _redirect(output: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, own in enumerate((nothing, file, file)):
        os.dup2(own, number)


def _fork_ranks(folder: Path, call: Call) -> None:
    ranks: dict[int, int] = {}
    for rank in range(call.world_size):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, folder, call)
        ranks[pid] = rank
    end = time.monotonic() + call.deadline_s
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
        (folder / f"{slow}.failure").write_text(f"did not end within {call.deadline_s} s")
    for pid in ranks:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _run_rank(rank: int, folder: Path, call: Call) -> None:
    """One forked rank; never returns."""
    import torch.distributed as dist

    code = 1
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), call.world_size),
            rank=rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.deadline_s),
        )
        module, _, name = call.function.partition(":")
        result = getattr(importlib.import_module(module), name)(*call.arguments)
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
    from tests import rank_server  # calls are pickled under this name

    rank_server.serve()
