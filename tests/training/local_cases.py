"""What the ranks of test_local_updates do; and local updates again, written plainly."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from slurm_pt.config.choices import GradientCompression, Outer
from slurm_pt.config.schema import ParallelConfig
from slurm_pt.parallel.data import make_reduction
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.local_updates import LocalUpdates
from slurm_pt.training.loop import StepRecord, train_loop
from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.optimizer import NamedAdamW, learning_rate
from slurm_pt.training.stored_state import stored_state
from tests.checkpoint.toy import checkpointer
from tests.training.cases import MODEL, TRAIN, build, dataset_of, groups_of, ignore, never

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from slurm_pt.config.schema import ModelConfig, TrainConfig
    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.training.rank_model import RankModel

STEPS = 13
LOCAL = {
    # Ordinary steps 1 to 3, then synchronised after 4, 8, 12 and the last, 13.
    "post-local SGD": replace(TRAIN, steps=STEPS, local_steps=4, local_after=3),
    "DiLoCo": replace(TRAIN, steps=STEPS, local_steps=5, outer=Outer.nesterov),
}
POWERSGD = ParallelConfig(
    gradient_compression=GradientCompression.powersgd, powersgd_rank=2, powersgd_start_step=2
)
LAYOUTS = [(1, 1, 4), (2, 1, 2), (1, 2, 2)]
Curve = tuple[list[float], list[float]]


@dataclass
class Replica:
    """Model, optimizer, and how its replicas come together."""

    groups: ProcessGroups
    model: RankModel
    config: TrainConfig
    parallel: ParallelConfig

    def __post_init__(self) -> None:
        parameters, dp = dict(self.model.named_parameters()), self.groups.dp
        self.optimizer = NamedAdamW(parameters, self.config)
        self.local = LocalUpdates.of(self.config, parameters, group=dp)
        self.reduction = make_reduction(self.parallel, parameters.values(), group=dp, sharding=None)
        self.records: list[StepRecord] = []

    def state(self) -> Any:
        return stored_state(self.model, self.optimizer, reduction=self.reduction, local=self.local)

    def train(
        self,
        tokens: Path,
        *,
        start_step: int = 0,
        save_at: int | None = None,
        save: Callable[[int], None] = ignore,
    ) -> None:
        train_loop(
            model=self.model,
            optimizer=self.optimizer,
            dataset=dataset_of(tokens, self.model.config, self.config),
            config=self.config,
            groups=self.groups,
            start_step=start_step,
            stop_requested=never,
            save_due=lambda: start_step + len(self.records) + 1 == save_at,
            save=save,
            record=self.records.append,
            phase=ignore,
            reduction=self.reduction,
            local=self.local,
        )

    def curve(self) -> Curve:
        return [r.loss for r in self.records], [r.grad_norm for r in self.records]

    def weights(self) -> str:
        """A hash of this rank's weights."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def make_replica(
    groups: ProcessGroups,
    config: TrainConfig,
    parallel: ParallelConfig,
    model: ModelConfig = MODEL,
) -> Replica:
    return Replica(groups, build(model, config, groups, parallel), config, parallel)


def curves(
    tokens: Path, layouts: list[tuple[int, int, int]]
) -> dict[tuple[int, int, int], dict[str, tuple[Curve, str]]]:
    """Losses, norms and a hash of the final weights of this rank, for each way and layout."""
    found: dict[tuple[int, int, int], dict[str, tuple[Curve, str]]] = {}
    for layout in layouts:
        groups = groups_of(ParallelLayout(*layout))
        found[layout] = {}
        for name, config in LOCAL.items():
            replica = make_replica(groups, config, ParallelConfig())
            replica.train(tokens)
            found[layout][name] = replica.curve(), replica.weights()
        groups.close()
    return found


def plain_curves(tokens: Path) -> dict[int, dict[str, Curve]]:
    """The same by number of replicas, all of them in one process."""
    groups = groups_of(ParallelLayout(1, 1, 1))
    found = {
        dp: {name: _plain(tokens, config, groups, dp) for name, config in LOCAL.items()}
        for dp in (2, 4)
    }
    groups.close()
    return found


def _plain(tokens: Path, config: TrainConfig, groups: ProcessGroups, dp: int) -> Curve:
    replicas = [build(MODEL, config, groups) for _ in range(dp)]
    optimizers = [NamedAdamW(dict(replica.named_parameters()), config) for replica in replicas]
    outer_weights = [parameter.detach().clone() for parameter in replicas[0].parameters()]
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
    return loss.item(), [parameter.grad for parameter in replica.parameters()]


def _held(replica: RankModel) -> list[Tensor]:
    return list(replica.parameters())


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
        "loaded": loaded_by_two(folder / "moved"),
        "uncompressed": uncompressed(tokens),
    }


RESUMED = {
    "post-local SGD": (LOCAL["post-local SGD"], ParallelConfig()),
    "DiLoCo": (LOCAL["DiLoCo"], ParallelConfig()),
    "PowerSGD": (replace(TRAIN, steps=STEPS), POWERSGD),
}


def resumes(
    tokens: Path, folder: Path, layout: tuple[int, int, int], save_at: int
) -> dict[str, dict[str, bool]]:
    """Whether a run that goes on from a checkpoint equals one that was never stopped."""
    groups = groups_of(ParallelLayout(*layout))
    found = {}
    for name, (config, parallel) in RESUMED.items():
        model = replace(MODEL, dropout=0.1)
        whole = make_replica(groups, config, parallel, model)
        whole.train(
            tokens,
            save_at=save_at,
            save=lambda step: _save(whole, folder / name, step),  # noqa: B023
        )
        rest = make_replica(groups, config, parallel, model)
        resumed = _resume(rest, folder / name)
        rest.train(tokens, start_step=save_at)
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
    config, parallel = RESUMED["DiLoCo"]
    replica = make_replica(four, config, parallel)
    means: dict[str, Tensor] = {}

    def save(step: int) -> None:
        _save(replica, folder, step)
        for name, tensor in replica.state().own.items():
            total = tensor.clone()
            torch.distributed.all_reduce(total, group=four.dp)
            means[name] = total / four.layout.dp

    replica.train(tokens, save_at=7, save=save)
    two = groups_of(ParallelLayout(2, 1, 2))
    split = _resume(make_replica(two, config, parallel), folder)
    two.close()
    four.close()
    return {"means": means, "split": split}


def loaded_by_two(folder: Path) -> tuple[tuple[int, str], dict[str, Tensor], list[bool]]:
    """What two replicas have after they loaded that."""
    groups = groups_of(ParallelLayout(1, 1, 2))
    config, parallel = RESUMED["DiLoCo"]
    replica = make_replica(groups, config, parallel)
    resumed = _resume(replica, folder)
    state = replica.state()
    agreed = state.tensors["model/embedding.tokens.weight"]
    own = state.own["model/embedding.tokens.weight"]
    momentum = state.tensors["outer/momentum/embedding.tokens.weight"]
    groups.close()
    return resumed, state.own, [torch.equal(agreed, own), bool(momentum.any())]


def _save(replica: Replica, folder: Path, step: int) -> None:
    tensors, shards, own = replica.state()
    checkpointer(folder, replica.groups).save(
        step, tensors, shards=shards, own=own, rank_state={}, common={}, wait=True
    )


def _resume(replica: Replica, folder: Path) -> tuple[int, str]:
    tensors, shards, own = replica.state()
    resumed = checkpointer(folder, replica.groups).resume(tensors, shards=shards, own=own)
    assert resumed is not None
    replica.optimizer.set_step(resumed.step)
    return resumed.step, resumed.own.value


def uncompressed(tokens: Path) -> dict[str, bool]:
    """Whether runs that nothing is compressed in equal an ordinary one bit for bit."""
    groups = groups_of(ParallelLayout(1, 1, 2))
    config = replace(TRAIN, steps=4)
    plain = make_replica(groups, config, ParallelConfig())
    plain.train(tokens)
    found = {"no local updates": plain.local is None, "nothing of its own": not plain.state().own}
    for name, changes in {
        "later": {"powersgd_start_step": 4},
        "full rank": {"powersgd_rank": 256, "powersgd_start_step": 0},
    }.items():
        parallel = replace(POWERSGD, **changes)
        compressed = make_replica(groups, config, parallel)
        compressed.train(tokens)
        same = compressed.weights() == plain.weights()
        found[name] = same and compressed.curve() == plain.curve()
    compressed = make_replica(groups, config, replace(POWERSGD, powersgd_start_step=0))
    compressed.train(tokens)
    found["compressed is another"] = compressed.weights() != plain.weights()
    groups.close()
    return found
