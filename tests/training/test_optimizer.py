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


def test_an_owned_part_is_updated_as_it_would_be_in_the_whole():
    whole, parts = parameters(), parameters()
    half = NamedAdamW(parts, CONFIG, owned=lambda tensor: tensor.detach().view(-1)[1:3])
    optimizer = NamedAdamW(whole, CONFIG)
    assert {tuple(moment.shape) for moment in half.state()["exp_avg"].values()} == {(2,)}
    before = {name: parameter.detach().clone() for name, parameter in parts.items()}
    for step in range(3):
        give_gradients(whole, step)
        give_gradients(parts, step)
        optimizer.step(lr=0.1)
        half.step(lr=0.1)
    for name, parameter in parts.items():
        owned, rest = parameter.detach().view(-1)[1:3], parameter.detach().view(-1)[3:]
        torch.testing.assert_close(owned, whole[name].detach().view(-1)[1:3])
        assert torch.equal(rest, before[name].view(-1)[3:])


def test_in_host_memory_it_does_the_same_and_takes_what_was_loaded():
    named, expected = parameters(), parameters()
    optimizer, plain = NamedAdamW(named, CONFIG), NamedAdamW(expected, CONFIG)
    optimizer.on_host = True  # as on a GPU: it works on copies
    for step in range(4):
        if step == 2:  # as a resume does
            with torch.no_grad():
                for one in (named, expected):
                    one["matrix"].fill_(0.5)
            optimizer.set_step(step)
            plain.set_step(step)
        give_gradients(named, step)
        give_gradients(expected, step)
        optimizer.step(lr=0.1)
        plain.step(lr=0.1)
    for name, parameter in named.items():
        assert torch.equal(parameter, expected[name])


def test_offloading_changes_nothing_on_a_cpu():
    optimizer = NamedAdamW(parameters(), replace(CONFIG, offload_optimizer=True))
    assert not optimizer.on_host


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_an_offloaded_update_equals_one_on_the_device():
    made = parameters()
    named = {name: nn.Parameter(parameter.detach().cuda()) for name, parameter in made.items()}
    expected = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    optimizer = NamedAdamW(named, replace(CONFIG, offload_optimizer=True))
    plain = NamedAdamW(expected, CONFIG)
    assert {moment.device.type for moment in optimizer.state()["exp_avg"].values()} == {"cpu"}
    for step in range(4):
        for one in (named, expected):
            generator = torch.Generator().manual_seed(step)
            for parameter in one.values():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient.cuda()
        optimizer.step(lr=0.1)
        plain.step(lr=0.1)
    copies = optimizer.copies
    assert copies is not None
    assert all(weight.is_pinned() for weight in copies.weights.values())
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), expected[name].detach())
