"""What the ranks of test_deepspeed do: our model under DeepSpeed, beside our own engine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from slurm_pt.config.choices import DType, Engine, Recompute, Schedule
from slurm_pt.config.schema import ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.errors import DivergedError
from slurm_pt.plan.deepspeed_memory import ZeroBytes
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.data import TokenDataset
from slurm_pt.training.engine_deepspeed import DeepSpeedEngine
from slurm_pt.training.loop import train_loop
from slurm_pt.training.step import TrainStep
from tests.checkpoint.toy import checkpointer
from tests.training.cases import (
    LLAMA,
    MODEL,
    ONE_F_ONE_B,
    TRAIN,
    build,
    groups_of,
    ignore,
    never,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.training.engine import StepEngine
    from slurm_pt.training.loop import LoopEnd, StepRecord

Layout = tuple[int, int, int]
TP2_DP2 = (2, 1, 2)
STOPPED_AT = 2
# Two micro-batches a step on each of two replicas; norms above 1, so that clipping is compared.
CONFIG = replace(TRAIN, steps=4, dtype=DType.float32, eval_interval=2, eval_batches=1)
TIED = replace(MODEL, num_layers=2, dropout=0.1)


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    parallel: ParallelConfig = ONE_F_ONE_B
    train: TrainConfig = CONFIG
    model: ModelConfig = TIED
    persistent_numbers: int = 0
    """ZeRO 3: of parameters that are not split."""


def on_deepspeed(zero: int, case: Case = Case(), **changes: Any) -> Case:
    return replace(
        case,
        parallel=replace(case.parallel, zero=zero),
        train=replace(case.train, engine=Engine.deepspeed, **changes),
    )


RANDOM = Case(train=replace(CONFIG, recompute=Recompute.selective))
SEQUENCE = Case(ParallelConfig(sequence=True), model=replace(LLAMA, num_layers=2))
HALF = Case(train=replace(CONFIG, dtype=DType.bfloat16))
CASES: dict[str, tuple[str, Case]] = {
    "native": ("", Case()),
    "zero 1": ("native", on_deepspeed(1)),
    "zero 2": ("native", on_deepspeed(2, offload_optimizer=True)),
    "zero 3": ("native", on_deepspeed(3, RANDOM)),
    "zero 3, offloaded": (
        "native",
        replace(
            on_deepspeed(3, offload_optimizer=True, offload_parameters=True),
            persistent_numbers=100,
        ),
    ),
    "native, llama, split sequence": ("", SEQUENCE),
    "zero 3, llama, split sequence": ("native, llama, split sequence", on_deepspeed(3, SEQUENCE)),
    "native, bfloat16": ("", HALF),
    "zero 1, bfloat16": ("native, bfloat16", on_deepspeed(1, HALF)),
    "zero 3, bfloat16": ("native, bfloat16", on_deepspeed(3, HALF)),
}
"""By name: the case that it must equal, and the case."""
RESUMED = ("zero 1", "zero 2", "zero 3")
MOVES: list[tuple[str, Layout, Case]] = [
    ("zero 1, tp2 dp2", TP2_DP2, on_deepspeed(1)),
    ("zero 3, dp4", (1, 1, 4), on_deepspeed(3, micro_batch_size=1)),
    ("zero 2, tp2 dp2", TP2_DP2, on_deepspeed(2)),
    ("native, tp4", (4, 1, 1), Case()),
]
"""Each goes on from what the one before saved; the first from a native pipeline."""
PIPELINE = Case(ParallelConfig(schedule=Schedule.zero_bubble))

Curve = list[tuple[float, float, float | None]]
"""Loss, gradient norm and loss on held-out tokens of each step."""


def everything(folder: Path, tokens: Path) -> dict[str, Any]:
    """All that is checked on four ranks, in one start of them."""
    groups = groups_of(ParallelLayout(*TP2_DP2))
    curves: dict[str, Curve] = {}
    resumed: dict[str, dict[str, Any]] = {}
    for name, (_, case) in CASES.items():
        curves[name], engine = _run(tokens, groups, case)
        if name in RESUMED:
            expected = curves[name], _digest(engine)
            resumed[name] = _stopped_and_resumed(folder / name, tokens, groups, case, expected)
    found: dict[str, Any] = {
        "curves": curves,
        "resumed": resumed,
        "bytes": {zero: _bytes(tokens, groups, on_deepspeed(zero)) for zero in (1, 2, 3)},
    }
    groups.close()
    found["moved"] = _moved(folder, tokens)
    return found


def _moved(folder: Path, tokens: Path) -> dict[str, Curve]:
    """The last two steps, after each move."""
    groups = groups_of(ParallelLayout(2, 2, 1))
    _run(tokens, groups, PIPELINE, stop_at=STOPPED_AT, save_to=folder / "0")
    groups.close()
    found = {}
    for number, (name, layout, case) in enumerate(MOVES):
        groups = groups_of(ParallelLayout(*layout))
        found[name], engine = _run(tokens, groups, case, load_from=folder / str(number))
        # What it saves is what it loaded: the next one goes on from the same step.
        _load(engine, folder / str(number), groups)
        _save(engine, folder / str(number + 1), groups)
        groups.close()
    return found


def _stopped_and_resumed(
    folder: Path, tokens: Path, groups: ProcessGroups, case: Case, expected: tuple[Curve, str]
) -> dict[str, Any]:
    """A run that is stopped, saved and resumed, beside one that was not: curve and last state."""
    whole, state = expected
    _run(tokens, groups, case, stop_at=STOPPED_AT, save_to=folder)
    rest, engine = _run(tokens, groups, case, load_from=folder)
    return {
        "curve": rest == whole[STOPPED_AT:],
        "state": _digest(engine) == state,
        "updates": engine.updates,
        "diverged": _diverges(engine),
        "untouched": _digest(engine) == state,
    }


def _diverges(engine: Any) -> str:
    """What is said when one replica has a gradient that is not finite."""
    norm = next(p for name, p in engine.model.named_parameters() if "norm" in name)
    bad = engine.groups.place.dp_rank == 1
    norm.register_hook(lambda gradient: gradient * float("inf") if bad else gradient)
    with engine.feed.ahead(range(1), prefetch=0) as data:
        loss = engine.gradients(0, engine.feed.take(0, data, give_up=never))
    totals = engine.reduce(0, loss, stop=False, save=False, blank=False)
    try:
        engine.update(totals, lr=1e-3)
    except DivergedError as error:
        return str(error)
    return "nothing"


def _run(
    tokens: Path,
    groups: ProcessGroups,
    case: Case,
    *,
    stop_at: int | None = None,
    save_to: Path | None = None,
    load_from: Path | None = None,
) -> tuple[Curve, StepEngine]:
    engine = _engine(tokens, groups, case)
    step = 0 if load_from is None else _load(engine, load_from, groups)
    records: list[StepRecord] = []
    # One rank is asked to stop: all agree on the step that it is in.
    stop: Callable[[], bool] = never
    if stop_at is not None and groups.rank == 1:
        stop = lambda: len(records) == stop_at - 1  # noqa: E731
    end: LoopEnd = train_loop(
        engine,
        start_step=step,
        stop_requested=stop,
        record=records.append,
    )
    assert end.stopped == (stop_at is not None)
    assert end.step == (stop_at or case.train.steps)
    if save_to is not None:
        _save(engine, save_to, groups)
    return [(r.loss, r.grad_norm, r.eval_loss) for r in records], engine


def _engine(tokens: Path, groups: ProcessGroups, case: Case) -> StepEngine:
    dataset = TokenDataset(
        tokens,
        seq_len=case.train.seq_len,
        global_batch_size=case.train.global_batch_size,
        vocab_size=case.model.vocab_size,
        seed=case.train.seed,
        validation_fraction=0.2,
    )
    if case.train.engine is Engine.deepspeed:
        return DeepSpeedEngine(
            case.model,
            parallel=case.parallel,
            train=case.train,
            dataset=dataset,
            groups=groups,
            phase=ignore,
            persistent_numbers=case.persistent_numbers,
        )
    model = build(case.model, case.train, groups, case.parallel)
    return TrainStep(model, case.train, dataset)


def _save(engine: StepEngine, folder: Path, groups: ProcessGroups) -> None:
    tensors, shards, _ = engine.stored()
    checkpointer(folder, groups).save(
        STOPPED_AT,
        tensors,
        shards=shards,
        rank_state={},
        common={"updates": engine.updates},
        wait=True,
    )


def _load(engine: StepEngine, folder: Path, groups: ProcessGroups) -> int:
    tensors, shards, _ = engine.stored()
    resumed = checkpointer(folder, groups).resume(tensors, shards=shards)
    assert resumed is not None
    engine.loaded(resumed.common["updates"])
    return resumed.step


def _digest(engine: StepEngine) -> str:
    tensors, _, _ = engine.stored()
    joined = b"".join(tensors[name].detach().numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(joined).hexdigest()


def _bytes(
    tokens: Path, groups: ProcessGroups, case: Case
) -> tuple[list[list[tuple[str, int]]], ZeroBytes]:
    """Sizes of the parameters in DeepSpeed's two groups, and what this rank holds of its state.

    Gradients: between two micro-batches for stage 1 and 2, where they are summed.
    """
    engine: Any = _engine(tokens, groups, case)
    with engine.feed.ahead(range(1), prefetch=0) as data:
        (first, *_) = engine.feed.take(0, data, give_up=never)
    engine.engine.backward(engine.engine(None, first))
    optimizer = engine.engine.optimizer
    parameters = dict(engine.model.named_parameters())
    shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in parameters.items()}
    sizes = [
        [(name, shape.numel()) for name, shape in shapes.items() if (len(shape) >= 2) == matrix]
        for matrix in (True, False)
    ]
    if case.parallel.zero == 3:
        weights = [p.ds_tensor for p in parameters.values()]
        gradients = [g for group in optimizer.averaged_gradients.values() for g in group]
    else:
        weights = optimizer.bit16_groups_flat
        kept = [g for group in optimizer.all_grad_tensors.values() for g in group]
        gradients = kept or [p.grad for p in parameters.values()]
    moments = [m[key] for m in engine.state.moments for key in ("exp_avg", "exp_avg_sq")]
    return sizes, ZeroBytes(
        weights=_size(weights),
        gradients=_size(gradients),
        optimizer=_size([*engine.state.flat, *moments]),
    )


def _size(tensors: list[torch.Tensor]) -> int:
    """Their bytes; two that are at one place count once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
