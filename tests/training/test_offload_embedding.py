"""A token embedding in host memory trains as one on the device."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from slurm_pt.config.schema import ParallelConfig
from slurm_pt.parallel.groups import create_groups
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.loop import train_loop
from tests.ranks import run_ranks
from tests.training.cases import LLAMA, TRAIN, engine_of

SHORT = replace(TRAIN, steps=6)
OFFLOADED = replace(SHORT, offload_embedding=True)


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1])
def test_on_a_cpu_it_changes_nothing(tokens, zero):
    case = "tests.training.cases:records_of"
    parallel = ParallelConfig(zero=zero)
    for ranks in zip(
        *(run_ranks(4, case, tokens, LLAMA, train, parallel) for train in (SHORT, OFFLOADED)),
        strict=True,
    ):
        assert ranks[0] == ranks[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("offload_optimizer", [False, True])
def test_on_a_gpu_the_losses_are_those_of_one_on_the_device(
    tokens, tmp_path, zero, offload_optimizer
):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    groups = create_groups(
        ParallelLayout(1, 1, 1), rank=0, device=torch.device("cuda", 0), timeout_s=60.0
    )
    losses = []
    for train in (SHORT, replace(OFFLOADED, offload_optimizer=offload_optimizer)):
        engine = engine_of(tokens, LLAMA, train, groups, parallel=ParallelConfig(zero=zero))
        table = dict(engine.model.named_parameters())["embedding.tokens.weight"]
        assert table.is_cuda != train.offload_embedding
        records = []
        train_loop(engine, record=records.append)
        losses.append([record.loss for record in records])
    groups.close()
    dist.destroy_process_group()
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
