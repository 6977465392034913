"""What the ranks of test_memory do: save, load in another layout, and count what loading takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slurm_pt.checkpoint import tensor_bytes
from slurm_pt.checkpoint.random_state import capture_random_state, restore_random_state
from slurm_pt.checkpoint.user_state import flatten, load_user_state
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


def own_loop_goes_on(folder: Path) -> dict[str, bool]:
    """A module with dropout, AdamW and a schedule: stopped after 3 of 6 steps, and not stopped."""
    groups = groups_of(1, 1, 2)
    saver = checkpointer(folder, groups)
    whole = _own_loop(groups.rank)
    losses = [_step(whole, groups) for _ in range(3)]
    tensors, tree = flatten(whole)
    saver.save(
        3,
        tensors,
        shards={},
        rank_state={"random": capture_random_state()},
        common={"tree": tree},
        wait=True,
    )
    losses += [_step(whole, groups) for _ in range(3)]
    resumed = _own_loop(seed=99)
    weight = resumed["model"][0].weight
    place = weight.data_ptr()
    loaded = load_user_state(checkpointer(folder, groups), resumed)
    assert loaded is not None
    assert loaded.rank_state is not None
    restore_random_state(loaded.rank_state["random"])
    rest = [_step(resumed, groups) for _ in range(3)]
    moments = [state["exp_avg"] for state in whole["optimizer"].state.values()]
    others = [state["exp_avg"] for state in resumed["optimizer"].state.values()]
    groups.close()
    return {
        "losses": rest == losses[3:],
        "weights": torch.equal(whole["model"][0].weight, weight),
        "moments": bool(moments) and all(map(torch.equal, moments, others)),
        "schedule": whole["schedule"].last_epoch == resumed["schedule"].last_epoch == 6,
        "loaded in place": weight.data_ptr() == place,
    }


def _own_loop(seed: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    torch.manual_seed(seed)  # ranks draw masks of their own
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def _step(state: dict[str, Any], groups: Any) -> float:
    state["optimizer"].zero_grad()
    loss = state["model"](torch.ones(4, 8, dtype=torch.float64)).square().mean()
    loss.backward()
    for parameter in state["model"].parameters():
        torch.distributed.all_reduce(parameter.grad, group=groups.dp)
    state["optimizer"].step()
    state["schedule"].step()
    return float(loss)
