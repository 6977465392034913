"""What the ranks of test_own_loop do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slurm_pt.checkpoint.random_state import capture_random_state, restore_random_state
from slurm_pt.checkpoint.user_state import flatten, load_user_state
from tests.checkpoint.toy import checkpointer, groups_of

if TYPE_CHECKING:
    from pathlib import Path


def own_loop_goes_on(folder: Path) -> dict[str, bool]:
    """A module with dropout, AdamW and a schedule: stopped after 3 of 6 steps, and not stopped."""
    groups = groups_of(1, 1, 2)
    saver = checkpointer(folder, groups)
    whole = _own_loop(groups.rank)
    losses = [_step(whole, groups) for _ in range(3)]
    tensors, _, tree = flatten(whole)
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
