"""What the state of a loop of one's own may hold, and what it may not."""

import pytest
import torch
from torch import nn

from slurm_pt.checkpoint.tensor_index import require_storable
from slurm_pt.checkpoint.user_state import flatten
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.model_state import ModelState

ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"a/b": ONE, "a": {"b": ONE}}, "two tensors of the state would be stored as 'a/b'"),
        ({"a": {1: ONE, "1": ONE}}, "two tensors of the state would be stored as 'a/1'"),
        ({"own": ONE}, "state\\['own'\\]: this name is taken"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a sparse or a meta tensor"),
        ({"a": torch.ones(2, device="meta")}, "a sparse or a meta tensor"),
    ],
)
def test_what_could_not_be_given_back_is_refused(state, reason):
    with pytest.raises(CheckpointError, match=reason):
        flatten(state)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_a_format_that_no_file_can_hold_is_refused_at_once(dtype):
    with pytest.raises(CheckpointError, match=f"x is {dtype}, which cannot be saved: convert it"):
        require_storable({"x": torch.zeros(1, dtype=dtype)})


class Counting(torch.optim.SGD):
    """Counts its steps in a plain number, as some optimizers do."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1


def test_an_optimizers_state_that_is_no_tensor_is_refused_not_lost():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.step()
    state = ModelState(model, optimizer)
    with pytest.raises(CheckpointError, match="step of weight is a int, no tensor"):
        state.tensors()
