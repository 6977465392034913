"""One process: weight gradients come when they are asked for, and are the same."""

import pytest
import torch
from torch import nn

from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from slurm_pt.parallel.weight_gradients import WeightGradients

DOUBLE = {"device": torch.device("cpu"), "dtype": torch.float64}


@pytest.fixture(params=[ColumnParallelLinear, RowParallelLinear])
def layer(request):
    axis = TensorAxis(weight_gradients=WeightGradients())
    made = request.param(3, 5, axis=axis, **DOUBLE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    return made


def backward(layer, x):
    layer(x).square().sum().backward()
    return x.grad


def expected_of(layer, x):
    """Gradients of torch's own layer: of the input, of the weight and of the bias."""
    whole = nn.Linear(3, 5, **DOUBLE)
    whole.load_state_dict(layer.state_dict())
    entered = x.detach().clone().requires_grad_()
    return backward(whole, entered), whole.weight.grad, whole.bias.grad


def test_what_is_put_off_is_missing_until_it_runs_and_adds_to_what_is_there(layer):
    x = torch.arange(12.0, dtype=torch.float64).view(2, 2, 3).requires_grad_()
    grad_x, grad_weight, grad_bias = expected_of(layer, x)
    layer.weight.grad = torch.ones_like(layer.weight)
    held = layer.weight.grad
    with layer.axis.weight_gradients.collect() as put_off:
        assert torch.allclose(backward(layer, x), grad_x, rtol=1e-14)
    assert torch.allclose(layer.bias.grad, grad_bias, rtol=1e-14)
    assert torch.equal(layer.weight.grad, torch.ones_like(layer.weight))
    (compute,) = put_off
    compute()
    assert layer.weight.grad is held  # in place: it may be a view into a bucket
    assert torch.allclose(layer.weight.grad, grad_weight + 1.0, rtol=1e-14)


def test_a_gradient_that_was_not_there_yet_is_made(layer):
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    _, grad_weight, _ = expected_of(layer, x)
    with layer.axis.weight_gradients.collect() as put_off:
        backward(layer, x)
    assert layer.weight.grad is None
    put_off[0]()
    assert torch.allclose(layer.weight.grad, grad_weight, rtol=1e-14)


def test_nothing_is_put_off_outside_of_collect(layer):
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    grad_x, grad_weight, _ = expected_of(layer, x)
    with layer.axis.weight_gradients.collect() as put_off:
        pass
    assert torch.allclose(backward(layer, x), grad_x, rtol=1e-14)
    assert torch.allclose(layer.weight.grad, grad_weight, rtol=1e-14)
    assert put_off == []


def test_a_bfloat16_product_goes_into_a_float32_gradient():
    later = WeightGradients()
    axis = TensorAxis(weight_gradients=later)
    layer = ColumnParallelLinear(3, 5, axis=axis, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.5)
    layer.weight.grad = torch.zeros_like(layer.weight)
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    with later.collect() as put_off:
        layer(x).sum().backward()
    put_off[0]()
    # Two rows of ones: each element is 2.
    assert torch.equal(layer.weight.grad, torch.full((5, 3), 2.0))


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("adds", [True, False])
def test_autograd_sees_every_gradient_where_layers_do_not_add_themselves(kind, adds):
    layer = kind(3, 5, axis=TensorAxis(adds_gradients=adds), **DOUBLE)
    with torch.no_grad():
        layer.weight.fill_(0.5)
        layer.bias.zero_()
    seen = []
    layer.weight.register_hook(seen.append)
    x = torch.arange(12.0, dtype=torch.float64).view(2, 2, 3).requires_grad_()
    _, grad_weight, _ = expected_of(layer, x)
    for _ in range(2):
        backward(layer, x)
    # The first one finds no `.grad` to add to.
    assert len([gradient for gradient in seen if gradient is not None]) == (1 if adds else 2)
    assert torch.allclose(layer.weight.grad, 2 * grad_weight, rtol=1e-14)
