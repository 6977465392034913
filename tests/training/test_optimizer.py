import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from slurm_pt.config.schema import TrainConfig
from slurm_pt.training.optimizer import NamedAdamW, learning_rate

CONFIG = TrainConfig(
    steps=13, global_batch_size=1, seq_len=1, lr=1.0, min_lr=0.1, warmup_steps=4, weight_decay=0.5
)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        # Warm-up in quarters; then 8 steps from step 4 to step 12: 0.1 + 0.45 * (1 + cos).
        (0, 0.25),
        (1, 0.5),
        (3, 1.0),
        (4, 1.0),  # cos 0 = 1
        (6, 0.1 + 0.45 * (1 + 2**-0.5)),  # a quarter of the way: cos 45 degrees
        (8, 0.55),  # half-way: cos 90 degrees = 0
        (10, 0.1 + 0.45 * (1 - 2**-0.5)),
        (12, 0.1),  # the last step
        (99, 0.1),
    ],
)
def test_the_learning_rate_is_a_function_of_the_step(step, expected):
    assert learning_rate(step, CONFIG) == pytest.approx(expected, rel=1e-14)


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate(0, replace(CONFIG, warmup_steps=0)) == 1.0


def test_a_run_of_one_step_has_the_peak():
    assert learning_rate(0, replace(CONFIG, warmup_steps=0, steps=1)) == 1.0


def test_a_run_that_ends_within_its_warm_up_has_no_cosine():
    short = replace(CONFIG, steps=2)
    assert [learning_rate(step, short) for step in range(2)] == [0.25, 0.5]


def parameters():
    torch.manual_seed(0)
    return {"matrix": nn.Parameter(torch.randn(3, 2)), "vector": nn.Parameter(torch.randn(3))}


def give_gradients(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_only_matrices_decay():
    named = parameters()
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = NamedAdamW(named, CONFIG)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(lr=0.1)
    # With no gradient only the decay moves a weight: by lr * weight_decay = 5 %.
    torch.testing.assert_close(named["matrix"].detach(), before["matrix"] * 0.95)
    torch.testing.assert_close(named["vector"].detach(), before["vector"], rtol=0, atol=0)


def test_the_state_exists_before_the_first_step_under_the_parameters_names():
    state = NamedAdamW(parameters(), CONFIG).state()
    assert state.keys() == {"exp_avg", "exp_avg_sq"}
    for moments in state.values():
        shapes = {name: tuple(tensor.shape) for name, tensor in moments.items()}
        assert shapes == {"matrix": (3, 2), "vector": (3,)}


@pytest.mark.parametrize("saved_after", range(5))
def test_loading_the_state_continues_bit_for_bit(saved_after):
    # F52 for all k: the learning rate comes from the step alone, whenever the save was.
    whole = parameters()
    optimizer = NamedAdamW(whole, CONFIG)
    for step in range(5):
        if step == saved_after:
            weights = {name: parameter.detach().clone() for name, parameter in whole.items()}
            state = copy.deepcopy(optimizer.state())
        give_gradients(whole, step)
        optimizer.step(learning_rate(step, CONFIG))

    rest = parameters()
    resumed = NamedAdamW(rest, CONFIG)
    with torch.no_grad():
        for name, parameter in rest.items():
            parameter.copy_(weights[name])
    for kind, moments in resumed.state().items():
        for name, value in moments.items():
            value.copy_(state[kind][name])
    resumed.set_step(saved_after)
    for step in range(saved_after, 5):
        give_gradients(rest, step)
        resumed.step(learning_rate(step, CONFIG))
    for name, parameter in rest.items():
        assert torch.equal(parameter, whole[name])
