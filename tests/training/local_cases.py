"""What the ranks of test_local_updates do; and local updates again, written plainly."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from slurm_pt.config.choices import GradientCompression, Outer, Schedule
from slurm_pt.config.schema import LoraConfig, ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.layers import NO_LORA
from slurm_pt.training.loop import StepRecord, train_loop
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.optimizer import NamedAdamW, learning_rate
from slurm_pt.training.step import TrainStep
from tests.checkpoint.toy import checkpointer
from tests.training.cases import (
    MODEL,
    ONE_F_ONE_B,
    TRAIN,
    build,
    dataset_of,
    engine_of,
    groups_of,
    ignore,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.training.rank_model import RankModel

STEPS = 13


@dataclass(frozen=True)
class Way:
    """How replicas train, and what."""

    train: TrainConfig
    parallel: ParallelConfig = ONE_F_ONE_B
    lora: LoraConfig = NO_LORA


EVERYWHERE = LoraConfig(
    rank=8, alpha=32.0, targets=["query", "key", "value", "attention.output", "up", "down"]
)
DILOCO = replace(TRAIN, steps=STEPS, local_steps=5, outer=Outer.nesterov)
LOCAL = {
    # Ordinary steps 1 to 3, then synchronised after 4, 8, 12 and the last, 13.
    "post-local SGD": Way(replace(TRAIN, steps=STEPS, local_steps=4, local_after=3)),
    "DiLoCo": Way(DILOCO),
    "DiLoCo of adapters": Way(replace(DILOCO, lr=3e-2), lora=EVERYWHERE),
}
POWERSGD = ParallelConfig(
    gradient_compression=GradientCompression.powersgd, powersgd_rank=2, powersgd_start_step=2
)
LAYOUTS = [(1, 1, 4), (2, 1, 2), (1, 2, 2)]
Curve = tuple[list[float], list[float]]


@dataclass
class Replica:
    """An engine with the records of its run."""

    engine: TrainStep
    records: list[StepRecord] = field(default_factory=list)

    def train(
        self,
        *,
        start_step: int = 0,
        save_at: int | None = None,
        save: Callable[[int], None] = ignore,
    ) -> None:
        train_loop(
            self.engine,
            start_step=start_step,
            save_due=lambda: start_step + len(self.records) + 1 == save_at,
            save=save,
            record=self.records.append,
        )

    def curve(self) -> Curve:
        return [r.loss for r in self.records], [r.grad_norm for r in self.records]

    def weights(self) -> str:
        """A hash of this rank's weights."""
        digest = hashlib.sha256()
        for parameter in self.engine.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def make_replica(
    tokens: Path, groups: ProcessGroups, way: Way, model: ModelConfig = MODEL
) -> Replica:
    return Replica(
        engine_of(tokens, model, way.train, groups, parallel=way.parallel, lora=way.lora)
    )


def curves(
    tokens: Path, layouts: list[tuple[int, int, int]]
) -> dict[tuple[int, int, int], dict[str, tuple[Curve, str]]]:
    """Losses, norms and a hash of the final weights of this rank, for each way and layout."""
    found: dict[tuple[int, int, int], dict[str, tuple[Curve, str]]] = {}
    for layout in layouts:
        groups = groups_of(ParallelLayout(*layout))
        found[layout] = {}
        for name, way in LOCAL.items():
            replica = make_replica(tokens, groups, way)
            replica.train()
            found[layout][name] = replica.curve(), replica.weights()
        groups.close()
    return found


def plain_curves(tokens: Path) -> dict[int, dict[str, Curve]]:
    """The same by number of replicas, all of them in one process."""
    groups = groups_of(ParallelLayout(1, 1, 1))
    found = {
        dp: {name: _plain(tokens, way, groups, dp) for name, way in LOCAL.items()} for dp in (2, 4)
    }
    groups.close()
    return found


def _plain(tokens: Path, way: Way, groups: ProcessGroups, dp: int) -> Curve:
    config = way.train
    replicas = [build(MODEL, config, groups, lora=way.lora) for _ in range(dp)]
    optimizers = [NamedAdamW(replica.trained_parameters(), config) for replica in replicas]
    outer_weights = [parameter.detach().clone() for parameter in _held(replicas[0])]
    # torch's own SGD makes DiLoCo's outer step.
    outer = torch.optim.SGD(
        outer_weights, lr=config.outer_lr, momentum=config.outer_momentum, nesterov=True
    )
    dataset = dataset_of(tokens, MODEL, config)
    losses, norms = [], []
    for step in range(config.steps):
        ids = torch.from_numpy(dataset.tokens(dataset.places(step, range(8))))
        found = [
            _gradients(replica, part, step)
            for replica, part in zip(replicas, ids.chunk(dp), strict=True)
        ]
        losses.append(sum(loss for loss, _ in found) / dp)
        gradients = [grads for _, grads in found]
        local = step >= config.local_after
        if not local:
            mean = [sum(parts) / dp for parts in zip(*gradients, strict=True)]
            gradients = [mean] * dp
        own_norms = [math.sqrt(sum(float(g.square().sum()) for g in grads)) for grads in gradients]
        norms.append(math.sqrt(sum(norm**2 for norm in own_norms) / dp))
        for replica, optimizer, grads, norm in zip(
            replicas, optimizers, gradients, own_norms, strict=True
        ):
            factor = min(1.0, config.grad_clip / (norm + 1e-6))
            for parameter, gradient in zip(_held(replica), grads, strict=True):
                parameter.grad = gradient * factor
            optimizer.step(learning_rate(step, config))
        if not local:
            _copy(_held(replicas[0]), outer_weights)
        if not local or ((step + 1) % config.local_steps and step + 1 < config.steps):
            continue
        means = [
            sum(p.detach() for p in parts) / dp for parts in zip(*map(_held, replicas), strict=True)
        ]
        if config.outer is Outer.nesterov:
            for weight, mean_weight in zip(outer_weights, means, strict=True):
                weight.grad = weight - mean_weight
            outer.step()
        else:
            _copy(means, outer_weights)
        for replica in replicas:
            _copy(outer_weights, _held(replica))
    return losses, norms


def _gradients(replica: RankModel, ids: Tensor, step: int) -> tuple[float, list[Tensor]]:
    for parameter in replica.parameters():
        parameter.grad = None
    loss = replica.chunks[0](None, MicroBatch(ids, samples=tuple(range(len(ids))), step=step))
    loss.backward()
    return loss.item(), [parameter.grad for parameter in _held(replica)]


def _held(replica: RankModel) -> list[Tensor]:
    return list(replica.trained_parameters().values())


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


def on_four(tokens: Path, folder: Path) -> dict[str, Any]:
    """All that four ranks do, in one launch."""
    return {
        "curves": curves(tokens, LAYOUTS),
        "resumed": resumes(tokens, folder / "resumed", (2, 1, 2), 10),
        "saved": saves_and_moves(tokens, folder / "moved"),
    }


def on_two(tokens: Path, folder: Path) -> dict[str, Any]:
    """All that two ranks do; `folder` is that of `on_four`."""
    return {
        "resumed": resumes(tokens, folder / "resumed by two", (1, 1, 2), 7),
        "loaded": loaded_by_two(tokens, folder / "moved"),
        "uncompressed": uncompressed(tokens),
    }


RESUMED = {**LOCAL, "PowerSGD": Way(replace(TRAIN, steps=STEPS), POWERSGD)}


def resumes(
    tokens: Path, folder: Path, layout: tuple[int, int, int], save_at: int
) -> dict[str, dict[str, bool]]:
    """Whether a run that goes on from a checkpoint equals one that was never stopped."""
    groups = groups_of(ParallelLayout(*layout))
    found = {}
    for name, way in RESUMED.items():
        model = replace(MODEL, dropout=0.1)
        whole = make_replica(tokens, groups, way, model)
        whole.train(
            save_at=save_at,
            save=lambda step: _save(whole, folder / name, step),  # noqa: B023
        )
        rest = make_replica(tokens, groups, way, model)
        resumed = _resume(rest, folder / name)
        rest.train(start_step=save_at)
        losses, norms = whole.curve()
        found[name] = {
            "exact": resumed == (save_at, "exact"),
            "curve": rest.curve() == (losses[save_at:], norms[save_at:]),
            "weights": rest.weights() == whole.weights(),
        }
    groups.close()
    return found


def saves_and_moves(tokens: Path, folder: Path) -> dict[str, Any]:
    """The mean of what four replicas save between two synchronisations of their own.

    And what two ranks of a split model make of it.
    """
    four = groups_of(ParallelLayout(1, 1, 4))
    way = RESUMED["DiLoCo"]
    replica = make_replica(tokens, four, way)
    means: dict[str, Tensor] = {}

    def save(step: int) -> None:
        _save(replica, folder, step)
        for name, tensor in replica.engine.stored().own.items():
            total = tensor.clone()
            torch.distributed.all_reduce(total, group=four.dp)
            means[name] = total / four.layout.dp

    replica.train(save_at=7, save=save)
    stages = groups_of(ParallelLayout(1, 2, 2))
    four_layers = replace(MODEL, num_layers=4)
    compressed = make_replica(tokens, stages, RESUMED["PowerSGD"], four_layers)
    compressed.train(save_at=7, save=lambda step: _save(compressed, folder / "errors", step))
    interleaved = replace(POWERSGD, schedule=Schedule.interleaved, virtual_stages=2)
    other = replace(RESUMED["PowerSGD"], parallel=interleaved)
    errors = _resume(make_replica(tokens, stages, other, four_layers), folder / "errors")
    stages.close()
    two = groups_of(ParallelLayout(2, 1, 2))
    split = _resume(make_replica(tokens, two, way), folder)
    two.close()
    four.close()
    return {"means": means, "split": split, "errors": errors}


def loaded_by_two(
    tokens: Path, folder: Path
) -> tuple[tuple[int, str], dict[str, Tensor], list[bool]]:
    """What two replicas have after they loaded that."""
    groups = groups_of(ParallelLayout(1, 1, 2))
    replica = make_replica(tokens, groups, RESUMED["DiLoCo"])
    resumed = _resume(replica, folder)
    state = replica.engine.stored()
    agreed = state.tensors["model/embedding.tokens.weight"]
    own = state.own["model/embedding.tokens.weight"]
    momentum = state.tensors["outer/momentum/embedding.tokens.weight"]
    groups.close()
    return resumed, state.own, [torch.equal(agreed, own), bool(momentum.any())]


def _save(replica: Replica, folder: Path, step: int) -> None:
    tensors, shards, own = replica.engine.stored()
    checkpointer(folder, replica.engine.groups).save(
        step, tensors, shards=shards, own=own, rank_state={}, common={}, wait=True
    )


def _resume(replica: Replica, folder: Path) -> tuple[int, str]:
    tensors, shards, own = replica.engine.stored()
    resumed = checkpointer(folder, replica.engine.groups).resume(tensors, shards=shards, own=own)
    assert resumed is not None
    replica.engine.loaded(resumed.step)
    return resumed.step, resumed.own.value


def uncompressed(tokens: Path) -> dict[str, bool]:
    """Whether runs that nothing is compressed in equal an ordinary one bit for bit."""
    groups = groups_of(ParallelLayout(1, 1, 2))
    config = replace(TRAIN, steps=4)
    plain = make_replica(tokens, groups, Way(config))
    plain.train()
    found = {
        "no local updates": plain.engine.local is None,
        "nothing of its own": not plain.engine.stored().own,
    }
    for name, changes in {
        "later": {"powersgd_start_step": 4},
        "full rank": {"powersgd_rank": 256, "powersgd_start_step": 0},
    }.items():
        parallel = replace(POWERSGD, **changes)
        compressed = make_replica(tokens, groups, Way(config, parallel))
        compressed.train()
        same = compressed.weights() == plain.weights()
        found[name] = same and compressed.curve() == plain.curve()
    compressed = make_replica(tokens, groups, Way(config, replace(POWERSGD, powersgd_start_step=0)))
    compressed.train()
    found["compressed is another"] = compressed.weights() != plain.weights()
    groups.close()
    return found
