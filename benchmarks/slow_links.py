"""What compressed gradients and local updates save in bytes, and cost in loss.

    python -m benchmarks.slow_links                     all ways of four replicas, three seeds
    python -m benchmarks.slow_links --seeds 1 --json F  one seed more, added to the file F

The model is half of hydra_configs/model/tiny.yaml, the tokens are those of the demo (the source of
the standard library, as bytes); every way sees the same samples in the same order and ends with one
evaluation on held-out tokens. Bytes are counted at the calls to the process groups and must equal
the formulas of slurm_pt/plan/traffic.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from slurm_pt.config.choices import GradientCompression, Outer
from slurm_pt.config.schema import ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.parallel.groups import create_groups
from slurm_pt.plan import traffic
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.corpus import prepare_stdlib
from slurm_pt.training.data import TokenDataset
from slurm_pt.training.loop import StepRecord, train_loop
from slurm_pt.training.rank_model import RankModel
from slurm_pt.training.step import TrainStep
from tests.ranks import run_ranks
from tests.training.traffic_cases import counting

DP = 4
PLAIN = ParallelConfig()
MODEL = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=64)
TRAIN = TrainConfig(
    steps=200,
    global_batch_size=8,
    micro_batch_size=2,
    seq_len=64,
    lr=3e-3,
    min_lr=3e-4,
    warmup_steps=20,
    eval_interval=200,
    eval_batches=32,
)


@dataclass(frozen=True)
class Way:
    """How replicas are kept together."""

    parallel: ParallelConfig = PLAIN
    train: TrainConfig = TRAIN


def powersgd(rank: int) -> Way:
    """Compressed after a tenth of the steps."""
    kind = GradientCompression.powersgd
    return Way(
        ParallelConfig(gradient_compression=kind, powersgd_rank=rank, powersgd_start_step=20)
    )


def diloco(local_steps: int) -> Way:
    """Local from the first step, with the paper's outer learning rate and momentum."""
    return Way(train=replace(TRAIN, local_steps=local_steps, outer=Outer.nesterov))


WAYS = {
    "none": Way(),
    "fp16": Way(ParallelConfig(gradient_compression=GradientCompression.fp16)),
    "bf16": Way(ParallelConfig(gradient_compression=GradientCompression.bf16)),
    "PowerSGD, rank 4": powersgd(4),
    "PowerSGD, rank 1": powersgd(1),
    "post-local SGD, 10 steps": Way(train=replace(TRAIN, local_steps=10, local_after=40)),
    "DiLoCo, 10 steps": diloco(10),
    "DiLoCo, 40 steps": diloco(40),
}


def losses_and_bytes(tokens: Path, seed: int) -> dict[str, tuple[float, float]]:
    """The held-out loss after the last step, and the bytes that a rank sends in a step (mean)."""
    layout = ParallelLayout(tp=1, pp=1, dp=DP)
    cpu = torch.device("cpu")
    found = {}
    for name, way in WAYS.items():
        groups = create_groups(layout, rank=dist.get_rank(), device=cpu, timeout_s=120.0)
        train = replace(way.train, seed=seed)
        model = RankModel(MODEL, parallel=way.parallel, train=train, groups=groups)
        dataset = TokenDataset(
            tokens,
            seq_len=train.seq_len,
            global_batch_size=train.global_batch_size,
            vocab_size=MODEL.vocab_size,
            seed=seed,
            validation_fraction=0.05,
        )
        records: list[StepRecord] = []
        with counting(groups) as sent:
            train_loop(TrainStep(model, train, dataset), record=records.append)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        planned = planned_bytes(way, shapes)
        if not math.isclose(sent["data"], planned, rel_tol=1e-12):
            raise AssertionError(f"{name}: {sent['data']} bytes counted, {planned} planned")
        loss = records[-1].eval_loss
        assert loss is not None
        found[name] = loss, sent["data"] / train.steps
        groups.close()
    return found


def planned_bytes(way: Way, shapes: list[tuple[int, ...]]) -> float:
    """Of a run, by the formulas."""
    parallel, train = way.parallel, way.train
    stage = traffic.StageShape(
        layers=MODEL.num_layers,
        has_embedding=True,
        has_head=True,
        parameters=sum(math.prod(shape) for shape in shapes),
    )
    step = traffic.StepShape(
        num_microbatches=1,
        micro_batch_size=train.micro_batch_size,
        seq_len=train.seq_len,
        hidden_size=MODEL.hidden_size,
        activation_bytes=4,
    )
    plain = traffic.data_bytes(stage, step, dp=DP)
    if train.local_steps > 1:
        each = traffic.local_update_bytes(stage, step, dp=DP, local_steps=train.local_steps)
        return train.local_after * plain + (train.steps - train.local_after) * each
    if parallel.gradient_compression is GradientCompression.powersgd:
        first, rank = parallel.powersgd_start_step, parallel.powersgd_rank
        each = traffic.powersgd_bytes(shapes, step, dp=DP, rank=rank)
        return first * plain + (train.steps - first) * each
    halves = {GradientCompression.fp16, GradientCompression.bf16}
    number_bytes = 2 if parallel.gradient_compression in halves else None
    return train.steps * traffic.data_bytes(stage, step, dp=DP, number_bytes=number_bytes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="results are kept here, and added to")
    options = parser.parse_args()
    results: dict[str, dict[str, tuple[float, float]]] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory(prefix="slow-links-") as folder:
        tokens = Path(folder) / "tokens"
        prepare_stdlib(tokens)
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            ranks = run_ranks(DP, "benchmarks.slow_links:losses_and_bytes", tokens, seed)
            results[str(seed)] = ranks[0]
            if options.json:
                options.json.write_text(json.dumps(results))
    report(results)


def report(results: dict[str, dict[str, tuple[float, float]]]) -> None:
    """Print a table of all seeds."""
    print(f"dp={DP}, {TRAIN.steps} steps, seeds {', '.join(results)}")
    plain_bytes = next(iter(results.values()))["none"][1]
    for name in WAYS:
        loss = statistics.mean(found[name][0] for found in results.values())
        changes = [found[name][0] - found["none"][0] for found in results.values()]
        sent = next(iter(results.values()))[name][1]
        print(
            f"{name:26} {sent / 1e3:8.1f} kB a step, 1/{plain_bytes / sent:.1f}; held-out loss "
            f"{loss:.4f}, against none {min(changes):+.4f} to {max(changes):+.4f}"
        )


if __name__ == "__main__":
    main()
