"""What the ranks of test_memory do: save, load in another layout, and count what loading takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slurm_pt.checkpoint import tensor_bytes
from slurm_pt.parallel.shard import Shard
from tests.checkpoint.allocations import Allocations
from tests.checkpoint.toy import checkpointer, groups_of

if TYPE_CHECKING:
    from pathlib import Path

BUFFER_BYTES = 1 << 16
"""In these tests: small beside the tensors, which are of 1 MiB."""
ROWS, COLUMNS = 512, 512


def parts_of(tp: int, tp_rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Shard]]:
    """Three tensors of 1 MiB when whole: split by rows, by columns, and whole on each rank."""
    numbers = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    shards = {
        "rows": Shard.over(0, tp=tp, tp_rank=tp_rank),
        "columns": Shard.over(1, tp=tp, tp_rank=tp_rank),
        "whole": Shard(),
    }
    tensors = {
        name: numbers.clone()
        if shard.dim is None
        else numbers.chunk(tp, shard.dim)[tp_rank].clone()
        for name, shard in shards.items()
    }
    return tensors, shards


def load_elsewhere(folder: Path) -> list[tuple[int, int, bool]]:
    """Saved at tp2 and loaded at dp2, and the other way: bytes held, bytes taken, all equal."""
    tensor_bytes.BUFFER_BYTES = BUFFER_BYTES  # this process is the test's alone
    found = []
    for name, saved, loaded in (("a", (2, 1, 1), (1, 1, 2)), ("b", (1, 1, 2), (2, 1, 1))):
        groups = groups_of(*saved)
        tensors, shards = parts_of(saved[0], groups.place.tp_rank)
        saver = checkpointer(folder / name, groups)
        saver.save(1, tensors, shards=shards, rank_state={}, common={}, wait=True)
        groups.close()
        groups = groups_of(*loaded)
        expected, shards = parts_of(loaded[0], groups.place.tp_rank)
        tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        loader = checkpointer(folder / name, groups)
        with Allocations() as taken:
            assert loader.resume(tensors, shards=shards) is not None
        groups.close()
        equal = all(torch.equal(tensors[name], expected[name]) for name in expected)
        found.append((sum(tensor.nbytes for tensor in tensors.values()), sum(taken.sizes), equal))
    return found
