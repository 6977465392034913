"""Our own training program: build the configured model, resume, train, save.

`train` is the whole of it, called on each rank.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_pt.checkpoint.base_model import BaseModel
from slurm_pt.config import Engine, RunConfig, read_config
from slurm_pt.errors import CheckpointError, RunFolderError, SlurmPtError
from slurm_pt.files import read_json
from slurm_pt.monitor.progress import record_metrics, render_rate
from slurm_pt.run import Run, say
from slurm_pt.starting import Clock, start_run

if TYPE_CHECKING:
    from slurm_pt.checkpoint.resuming import Resumed
    from slurm_pt.training.data import TokenDataset
    from slurm_pt.training.engine import StepEngine
    from slurm_pt.training.loop import StepRecord


NOTABLE_WAIT = 0.1
"""Share of a step's time above which the wait for tokens is shown beside the speed."""


def train(cfg: Any) -> dict[str, Any] | None:
    """Trains the configured model to its last step, or until the run is to stop.

    Returns the last step and loss; None when stopped on request.
    """
    config = read_config(cfg)
    run = start_run(cfg, config)
    clock = Clock()
    trainer = _build(run, config)
    clock.lap("build")
    first_step = trainer.resume(run)
    clock.lap("resume")
    run.timings_s |= clock.parts_s
    if run.should_stop():  # asked to stop before there was anything new to save
        return None
    end = trainer.train(run, first_step)
    if end.stopped:
        if end.step == first_step:  # nothing new to save: asked while it waited for tokens
            run.accept_stop()
        else:
            trainer.save_and_stop(run, end.step)
        return None
    run.notice = None
    trainer.save(run, end.step)
    run.checkpointer.wait()
    run.step = end.step
    return {"step": end.step, "loss": trainer.last_loss}


@dataclasses.dataclass
class _Trainer:
    """An engine with its model, optimizer and data, tied to a run."""

    config: RunConfig
    engine: StepEngine
    last_loss: float | None = None
    base: BaseModel | None = None
    """What the adapters belong to; None: there are none, or it is not loaded yet."""

    def resume(self, run: Run) -> int:
        """The step to go on from; 0 for a run that has no checkpoint yet."""
        tensors, shards, own = self.engine.stored()
        resumed = run.checkpointer.resume(tensors, shards=shards, own=own)
        has_adapters = self.config.lora.rank is not None
        if resumed is None or has_adapters:  # checkpoints of adapters do not hold their base
            base = self._load_base(run)
            self.base = base if has_adapters else None
        if resumed is None:
            self.engine.begin()
            return 0
        if self.base is not None:
            stored = BaseModel.of(resumed.common)
            if stored is not None:
                stored.require(self.base)
        self._check_own(run, resumed)
        self.engine.loaded(resumed.common.get("updates", resumed.step))
        self.engine.loss_scale.load(resumed.common.get("loss_scale"))
        run.note_resumed(resumed.step, resumed.skipped, own=resumed.own.value)
        return resumed.step

    def _load_base(self, run: Run) -> BaseModel:
        """The weights that the run starts from; random ones are there already."""
        if self.config.train.init_from is None:
            return BaseModel(seed=self.config.train.seed)
        tensors, shards = self.engine.base()
        path = Path(self.config.train.init_from).expanduser()
        return run.checkpointer.load_weights(path, tensors, shards=shards)

    def _check_own(self, run: Run, resumed: Resumed) -> None:
        """Says what another number of replicas means for what each of them had of its own."""
        from slurm_pt.checkpoint.resuming import OwnState

        is_local = self.config.train.local_steps > 1
        if is_local and resumed.own in {OwnState.absent, OwnState.dropped}:
            path = run.folder.checkpoints / f"step_{resumed.step:08d}"
            raise CheckpointError(
                f"{path} does not hold what each replica had between local updates in this split "
                "of the model. To fix: set parallel.tp, pp, schedule, stage_layers and train.* as "
                f"they were when it was saved, or begin a new run with train.init_from={path}"
            )
        if run.rank != 0:
            return
        if resumed.own is OwnState.mean:
            what = "weights and moments" if is_local else "compression errors"
            say(f"another number of replicas: each begins with the mean of their {what}")
        elif resumed.own is OwnState.dropped:
            say("another split or compression: the errors of compressed gradients begin anew")

    def train(self, run: Run, first_step: int) -> Any:
        from slurm_pt.training.loop import train_loop

        return train_loop(
            self.engine,
            start_step=first_step,
            stop_requested=run.request.is_set,
            save_due=run.save_interval_is_over,
            save=lambda step: self.save(run, step),
            record=lambda record: self._record(run, record, first_step),
            prefetch=self.config.data.prefetch,
        )

    def _record(self, run: Run, record: StepRecord, first_step: int) -> None:
        self.last_loss = record.loss
        if run.rank == 0:
            figures = {k: v for k, v in dataclasses.asdict(record).items() if v is not None}
            record_metrics(run.folder, figures | {"attempt": run.attempt.number})
            if record.step == first_step + 1:
                _report_start(run, record.step_s)
        tokens_per_s = round(record.tokens / record.step_s, 1)
        speed = render_rate(tokens_per_s)
        if record.data_s > NOTABLE_WAIT * record.step_s:
            speed += f", {record.data_s / record.step_s:.0%} of it waiting for data"
        run.show(
            step=record.step,
            steps=self.config.train.steps,
            loss=record.loss,
            tokens_per_s=tokens_per_s,
            speed=speed,
        )

    def save(self, run: Run, step: int) -> None:
        tensors, shards, own = self.engine.stored()
        common = {
            "global_batch_size": self.config.train.global_batch_size,
            "updates": self.engine.updates,
            "loss_scale": self.engine.loss_scale.state(),
        }
        if self.base is not None:
            common |= self.base.record()
        run.save_tensors(step, tensors, shards=shards, common=common, own=own)

    def save_and_stop(self, run: Run, step: int) -> None:
        """The last save before the nodes are taken, if it fits into the time that is left."""
        run.step = step
        notice = run.accept_stop()
        run.checkpointer.close()  # a periodic save under way comes first
        if not run.last_save_fits(notice):
            return
        try:
            self.save(run, step)
        except CheckpointError:
            # A full disk, say. It was reported; the next attempt resumes from an older step.
            say("the last save failed: the last committed step counts")


def _build(run: Run, config: RunConfig) -> _Trainer:
    """The engine of this rank with its data."""
    from slurm_pt.training.data import TokenDataset

    dataset = TokenDataset(
        _data_paths(run, config),
        seq_len=config.train.seq_len,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        vocab_size=config.model.vocab_size,
        mask_documents=config.data.mask_documents,
        validation_fraction=config.data.validation_fraction,
    )
    if config.train.eval_interval is not None:
        dataset.check_validation(config.train.eval_batches)
    return _Trainer(config, _engine(run, config, dataset))


def _engine(run: Run, config: RunConfig, dataset: TokenDataset) -> StepEngine:
    """What runs the steps of this rank, with its part of the model."""
    phase = run.heartbeat.enter
    if config.train.engine is Engine.deepspeed:
        from slurm_pt.training.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(
            config.model,
            parallel=config.parallel,
            train=config.train,
            dataset=dataset,
            groups=run.groups,
            phase=phase,
        )
    from slurm_pt.training.rank_model import RankModel
    from slurm_pt.training.step import TrainStep

    model = RankModel(
        config.model,
        parallel=config.parallel,
        train=config.train,
        groups=run.groups,
        lora=config.lora,
    )
    return TrainStep(model, config.train, dataset, phase=phase)


def _data_paths(run: Run, config: RunConfig) -> Path | dict[Path, float]:
    """The token files; the default corpus is made by rank 0 where it is not there yet."""
    if config.data.mixture is not None:
        return {Path(part.path).expanduser(): part.weight for part in config.data.mixture}
    if config.data.path is not None:
        return Path(config.data.path).expanduser()
    import platform

    from slurm_pt.training.corpus import prepare_stdlib

    folder = run.path.parent / "data" / f"stdlib-{platform.python_version()}"

    def prepare() -> str | None:
        try:
            prepare_stdlib(folder)
        except SlurmPtError as error:
            return str(error)
        return None

    problem = run.rank_0_first(prepare)
    if problem is not None:
        raise RunFolderError(problem)
    return folder


def _report_start(run: Run, first_step_s: float) -> None:
    """Where the time from the start of the job to its first step went."""
    parts = {**run.timings_s, "first_step": round(first_step_s, 3)}
    began = read_json(run.attempt.begin)["time"]
    total_s = round(time.time() - began, 3)
    parts["before_python"] = round(max(0.0, total_s - sum(parts.values())), 3)
    run.folder.record_event(
        "first_step", attempt=run.attempt.number, since_job_start_s=total_s, parts_s=parts
    )
