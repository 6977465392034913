"""Ranks that save without end and are killed at random moments, again and again.

    python -m tests.checkpoint.kill_rounds FOLDER ROUNDS

One process imports torch and forks the ranks of each round. Each round must find the checkpoint
that the round before left, load it and go on. Prints the step reached and the number of rounds
whose kill left something half-done.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slurm_pt.checkpoint import store
from slurm_pt.parallel.shard import Shard
from tests.checkpoint.toy import checkpointer, groups_of

WORLD_SIZE = 2


def save_for_ever(folder: Path, rank: int, meeting_point: Path, ready: int) -> None:
    """One rank: resume, check every element, then save step after step in the background."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(meeting_point), WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    groups = groups_of(tp=WORLD_SIZE, pp=1, dp=1)
    tensors = {f"weight.{number}": torch.zeros(64, 512) for number in range(8)}
    shards = {
        name: Shard.over(number % 2, tp=WORLD_SIZE, tp_rank=rank)
        for number, name in enumerate(tensors)
    }
    saver = checkpointer(folder, groups, keep_last=1)
    resumed = saver.resume(tensors, shards=shards)
    step = 0
    if resumed is not None:
        step = resumed.common["step"]
        assert resumed.step == step
        assert resumed.skipped == ()
        assert resumed.rank_state == {"rank": rank, "step": step}
        assert all(bool((tensor == step).all()) for tensor in tensors.values())
    os.write(ready, b"r")
    while True:
        step += 1
        for tensor in tensors.values():
            tensor.fill_(step)
        saver.save(
            step,
            tensors,
            shards=shards,
            rank_state={"rank": rank, "step": step},
            common={"step": step},
            wait=False,
        )


def kill_in(folder: Path, number: int, delay_s: float) -> None:
    """One round."""
    reading, ready = os.pipe()
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            try:
                save_for_ever(folder, rank, folder.parent / f"meeting-{number}", ready)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        pids.append(pid)
    os.close(ready)
    started = b""
    while len(started) < WORLD_SIZE and (got := os.read(reading, 1)):
        started += got
    os.close(reading)
    time.sleep(delay_s)
    for pid in random.sample(pids, WORLD_SIZE):  # not always the same one first
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if len(started) < WORLD_SIZE:
        raise SystemExit(f"round {number}: a rank did not get as far as its first save")


def main(folder: Path, rounds: int) -> None:
    random.seed(42)
    reached, cut_off = 0, 0
    for number in range(rounds):
        kill_in(folder, number, random.uniform(0.0, 0.4))
        stored = store.list_checkpoints(folder)
        assert [store.find_damage(checkpoint.path) for checkpoint in stored] == [None] * len(stored)
        step = stored[0].step if stored else 0
        assert step >= reached
        reached = step
        cut_off += any(path.suffix == ".tmp" for path in folder.glob("*"))
    print(reached, cut_off)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
