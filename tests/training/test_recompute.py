"""Recomputation changes what is kept for the backward pass, and nothing else."""

from dataclasses import replace

import pytest
import torch

from slurm_pt.config.choices import DType, Recompute, Schedule
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.model import GPTStage, StageSpan
from tests.ranks import run_ranks
from tests.training.cases import LLAMA, MODEL
from tests.training.recompute_cases import WAYS

MODELS = {"gpt2": replace(MODEL, dropout=0.1), "llama": LLAMA}


def passes(model, recompute):
    """Loss, gradients by name, and the bytes that autograd keeps of a forward pass."""
    stage = GPTStage(
        model,
        StageSpan(range(model.num_layers), first=True, last=True),
        axis=TensorAxis(),
        device=torch.device("cpu"),
        dtype=DType.float64,
        seed=1,
        recompute=recompute,
    )
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    weights = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = stage(None, MicroBatch(tokens, (0, 1), 3))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return loss.item(), gradients, sum(kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_same_and_less_is_kept(name):
    loss, gradients, kept = passes(MODELS[name], Recompute.none)
    bytes_kept = [kept]
    for recompute in (Recompute.selective, Recompute.full):
        other_loss, other_gradients, kept = passes(MODELS[name], recompute)
        assert other_loss == loss
        for parameter, gradient in gradients.items():
            # RMSNorm's parts of a gradient are added up in another order.
            torch.testing.assert_close(other_gradients[parameter], gradient, rtol=1e-11, atol=1e-15)
        bytes_kept.append(kept)
    assert bytes_kept[0] > bytes_kept[1] > bytes_kept[2], bytes_kept


@pytest.fixture(scope="module")
def gradients(tokens):
    """Of the whole model, by way."""
    ranks = run_ranks(4, "tests.training.recompute_cases:gradients", tokens)
    return {way: {k: v for rank in ranks for k, v in rank[way].items()} for way in WAYS}


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way)))
def test_every_schedule_has_the_gradients_of_the_plain_one_with_any_recomputation(gradients, way):
    plain = gradients[Schedule.one_f_one_b, Recompute.none, way[2]]
    found = gradients[way]
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        # The second tensor rank has the rows of tokens that do not occur.
        assert gradient.any() or name == "1 embedding.tokens.weight", name
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-14)
