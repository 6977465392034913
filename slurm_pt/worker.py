"""One rank's life: read the run, meet the others, build, resume, train, leave with the right code.

`python -m slurm_pt.worker RUN` is what srun and the local launcher start. `start` is the part that
every loop needs, ours or the user's; `train` is our loop. Torch is imported late, so that a wrong
world is refused before it, and a signal in its first seconds is not lost.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_pt.config import JobConfig, RunConfig, read_config, read_job_config
from slurm_pt.errors import (
    CheckpointError,
    LaunchError,
    RunFinishedError,
    RunFolderError,
    SlurmPtError,
)
from slurm_pt.launch.attempt import begin_attempt
from slurm_pt.launch.environment import RankInfo, check_world, read_rank
from slurm_pt.launch.preemption import StopRequest, listen, shield
from slurm_pt.monitor.progress import JobComment, make_heartbeat, record_metrics
from slurm_pt.plan import Plan, make_plan, split_layers
from slurm_pt.program import run_program
from slurm_pt.run import Run, owner_nonce
from slurm_pt.run_dir import AttemptDir, RunDir, create_run, open_run, read_json, run_dir_of
from slurm_pt.session import current_run
from slurm_pt.submit.slurm import SlurmClient

if TYPE_CHECKING:
    from slurm_pt.launch.hello import Hello
    from slurm_pt.launch.rendezvous import Meeting
    from slurm_pt.train.loop import StepRecord
    from slurm_pt.train.model import GPTStage
    from slurm_pt.train.optimizer import NamedAdamW

__all__ = ["Run", "main", "start", "train"]


def start(cfg: Any) -> Run:
    """Brings this rank into its run: ranks, process groups, run folder, the wish to stop.

    Works the same under `python`, `torchrun`, `srun` and the jobs that slurm_pt submits. `cfg` is
    the Hydra configuration; of it the keys of JobConfig are read, the rest is yours.

    Raises:
        LaunchError: the world is not the one that the configuration asks for.
        RunFolderError: the folder cannot be written, or another job writes it.
    """
    config = read_job_config(cfg)
    return _start(cfg, config)


class _Clock:
    """Seconds of each part of the start."""

    def __init__(self) -> None:
        self.parts_s: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.parts_s[part] = round(now - self._last, 3)
        self._last = now


def _start(cfg: Any, config: JobConfig) -> Run:
    clock = _Clock()
    request = listen()
    info = read_rank(os.environ)
    folder = _folder(config, cfg)
    plan = _plan(config, info, folder)
    check_world(info, plan.layout, allow_tp_across_nodes=config.parallel.allow_tp_across_nodes)
    try:
        folder.attempts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"run_root={config.run_root}: {error.filename}: {error.strerror}. Set run_root to a "
            "folder that you can write"
        ) from error
    meeting = _meet(config, info, folder, request, lambda _: _begin(folder, cfg=cfg, plan=plan))
    if "refused" in meeting.agreed:
        raise RunFolderError(meeting.agreed["refused"])
    if "finished" in meeting.agreed:
        raise RunFinishedError(meeting.agreed["finished"])
    attempt = AttemptDir(Path(meeting.agreed["attempt"]))
    clock.lap("rendezvous")
    device = _device(config, info)
    clock.lap("imports")
    _join(meeting, config, info, device)
    from slurm_pt.parallel.groups import create_groups

    timeout_s = config.cluster.collective_timeout_s
    groups = create_groups(plan.layout, rank=info.rank, device=device, timeout_s=timeout_s)
    clock.lap("groups")
    client = SlurmClient()
    number = attempt.number
    run = Run(
        config=config,
        info=info,
        plan=plan,
        folder=folder,
        attempt=attempt,
        groups=groups,
        request=request,
        heartbeat=make_heartbeat(
            folder, config.monitor, rank=info.rank, host=socket.gethostname(), attempt=number
        ),
        comment=JobComment(client, info.requeue_key, config.monitor.comment_s),
        client=client,
        nonce=owner_nonce(attempt),
        by_hand="SLURM_PT_ATTEMPT_DIR" not in os.environ,
        close_launch=meeting.close,
        timings_s=clock.parts_s,
    )
    current_run.set(run)
    return run


def _folder(config: JobConfig, cfg: Any) -> RunDir:
    given = os.environ.get("SLURM_PT_RUN_DIR")
    return RunDir(Path(given)) if given else run_dir_of(config, cfg)


def _plan(config: JobConfig, info: RankInfo, folder: RunDir) -> Plan:
    """The plan that the job was submitted with; for one started by hand, from the world it has."""
    if "SLURM_PT_RUN_DIR" in os.environ:
        return Plan.from_json(read_json(folder.plan))
    parallel = config.parallel
    if parallel.dp is None:
        dp = max(1, info.world_size // (parallel.tp * parallel.pp))
        config = dataclasses.replace(config, parallel=dataclasses.replace(parallel, dp=dp))
    slurm = dataclasses.replace(config.slurm, nodes=info.num_nodes)
    return make_plan(dataclasses.replace(config, slurm=slurm))


def _meet(
    config: JobConfig,
    info: RankInfo,
    folder: RunDir,
    request: StopRequest,
    agree: Callable[[tuple[Hello, ...]], dict[str, Any]],
) -> Meeting:
    from slurm_pt.launch.environment import affinity_warning
    from slurm_pt.launch.hello import make_hello
    from slurm_pt.launch.network import list_interfaces, validate_interface_settings
    from slurm_pt.launch.rendezvous import launch_key, meet

    problem = None
    try:
        validate_interface_settings(os.environ, list_interfaces())
    except LaunchError as error:
        problem = str(error)  # told to all ranks, so that the message is the same everywhere
    hello = make_hello(info, config_signature=folder.name, problem=problem)
    if warning := affinity_warning(config.slurm.cpus_per_task, hello.affinity_cpus):
        _say(warning)
    return meet(
        info,
        folder=folder.attempts,
        launch_key=launch_key(info, os.environ),
        hello=hello,
        timeout_s=config.cluster.start_timeout_s,
        interface=config.cluster.interface,
        log=_say,
        stop_requested=request.is_set,
        agree=agree,
    )


def _say(line: str) -> None:
    print(f"slurm_pt: {line}", file=sys.stderr, flush=True)  # noqa: T201


def _device(config: JobConfig, info: RankInfo) -> Any:
    import torch

    from slurm_pt.launch.environment import pick_device_index

    wanted = config.cluster.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            f"cluster.device=cuda, but torch sees no GPU on {socket.gethostname()} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). Set "
            "slurm.gpus_per_node, or cluster.device=cpu"
        )
    device = torch.device("cuda", pick_device_index(torch.cuda.device_count(), info))
    torch.cuda.set_device(device)
    return device


def _join(meeting: Meeting, config: JobConfig, info: RankInfo, device: Any) -> None:
    """torch.distributed over a store on the socket that rank 0 has kept open."""
    import datetime as dt

    import torch.distributed as dist

    stores: Any = dist  # the stores are there, but torch's stubs do not export them
    if info.world_size > 1:
        # The interface that leads to rank 0, unless the user chose one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
        if meeting.several_machines:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", meeting.interface)
    timeout = dt.timedelta(seconds=config.cluster.collective_timeout_s)
    if info.world_size == 1:
        store = stores.HashStore()
    else:
        store = stores.TCPStore(
            meeting.address,
            meeting.port,
            info.world_size,
            is_master=info.rank == 0,
            timeout=timeout,
            master_listen_fd=meeting.take_store_fd(),
        )
    # gloo beside NCCL: rank 0's word to the others and checkpoint threads do not need the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout
    )


def _begin(folder: RunDir, *, cfg: Any, plan: Plan) -> dict[str, Any]:
    """The attempt that the batch script began; for a start by hand, rank 0 begins one here.

    Told to all ranks: either the attempt's folder, or why there can be none.
    """
    given = os.environ.get("SLURM_PT_ATTEMPT_DIR")
    if given:
        return {"attempt": given}
    try:
        spec = {"entry": None, "overrides": sys.argv[1:], "cwd": str(Path.cwd())}
        create_run(folder, cfg=cfg, spec=spec, plan=plan.as_json())
        attempt = begin_attempt(folder)
    except SlurmPtError as error:
        return {"refused": str(error)}
    if attempt is None:
        return {"finished": f"{folder.path} is finished; its done.json says how it went"}
    return {"attempt": str(attempt.path)}


# ------------------------------------------------------------------------------- our own trainer


def train(cfg: Any) -> dict[str, Any] | None:
    """Trains the configured model to its last step, or until the run is to stop.

    Returns the last step and loss; None when stopped on request.
    """
    config = read_config(cfg)
    run = _start(cfg, config)
    clock = _Clock()
    trainer = _build(run, config)
    clock.lap("build")
    first_step = trainer.resume(run)
    clock.lap("resume")
    run.timings_s |= clock.parts_s
    if run.should_stop():  # asked to stop before there was anything new to save
        return None
    run.prepare_to_save()
    end = trainer.train(run, first_step)
    if end.stopped:
        trainer.save_and_stop(run, end.step)
        return None
    run.notice = None
    trainer.save(run, end.step)
    run.checkpointer.wait()
    run.step = end.step
    return {"step": end.step, "loss": trainer.last_loss}


@dataclasses.dataclass
class _Trainer:
    """Our model, optimizer and data, tied to a run."""

    config: RunConfig
    stage: GPTStage
    optimizer: NamedAdamW
    dataset: Any
    last_loss: float | None = None

    def tensors(self) -> tuple[dict[str, Any], dict[str, int | None]]:
        """Everything to be saved by its stored name, and the dimension it is split along."""
        stored, dims = self.stage.checkpoint_names(), self.stage.shard_dims()
        tensors: dict[str, Any] = {}
        shard_dims: dict[str, int | None] = {}
        for name, parameter in self.stage.named_parameters():
            tensors[f"model/{stored[name]}"] = parameter.detach()
            shard_dims[f"model/{stored[name]}"] = dims[name]
        for key, moment in self.optimizer.state_tensors().items():
            kind, _, name = key.partition("/")
            tensors[f"optimizer/{kind}/{stored[name]}"] = moment
            shard_dims[f"optimizer/{kind}/{stored[name]}"] = dims[name]
        return tensors, shard_dims

    def resume(self, run: Run) -> int:
        """The step to go on from; 0 for a run that has no checkpoint yet."""
        tensors, shard_dims = self.tensors()
        resumed = run.checkpointer.resume(tensors, shard_dims=shard_dims)
        if resumed is None:
            return 0
        self.optimizer.set_step(resumed.step)
        run.note_resumed(resumed.step, resumed.skipped)
        return resumed.step

    def train(self, run: Run, first_step: int) -> Any:
        from slurm_pt.train.loop import train_loop

        return train_loop(
            stage=self.stage,
            optimizer=self.optimizer,
            dataset=self.dataset,
            config=self.config.train,
            groups=run.groups,
            start_step=first_step,
            stop_requested=run.request.is_set,
            save_due=run.save_interval_is_over,
            save=lambda step: self.save(run, step),
            record=lambda record: self._record(run, record, first_step),
            phase=run.heartbeat.enter,
        )

    def _record(self, run: Run, record: StepRecord, first_step: int) -> None:
        self.last_loss = record.loss
        if run.rank == 0:
            line = dataclasses.asdict(record) | {"attempt": run.attempt.number}
            record_metrics(run.folder, line)
            if record.step == first_step + 1:
                _report_start(run, record.step_s)
        run.show(
            step=record.step,
            steps=self.config.train.steps,
            loss=record.loss,
            tokens_per_s=round(record.tokens / record.step_s, 1),
        )

    def save(self, run: Run, step: int) -> None:
        tensors, shard_dims = self.tensors()
        common = {"global_batch_size": self.config.train.global_batch_size}
        run.save_tensors(step, tensors, shard_dims=shard_dims, common=common)

    def save_and_stop(self, run: Run, step: int) -> None:
        """The last save before the nodes are taken, if it fits into the time that is left."""
        run.step = step
        notice = run.accept_stop()
        run.checkpointer.close()  # a periodic save under way comes first
        if not run.last_save_fits(notice):
            return
        try:
            self.save(run, step)
        except CheckpointError as error:
            # A full disk, say. It is on record; the next attempt resumes from an older step.
            _say(f"the last save failed, the last committed step counts: {error}")


def _build(run: Run, config: RunConfig) -> _Trainer:
    """Model shard, optimizer and data of this rank."""
    from slurm_pt.train.data import TokenDataset
    from slurm_pt.train.model import GPTStage
    from slurm_pt.train.optimizer import NamedAdamW

    groups = run.groups
    layers = split_layers(config.model.num_layers, groups.layout.pp)[groups.place.pp_rank]
    stage = GPTStage(
        config.model,
        layers=layers,
        first=groups.first_stage,
        last=groups.last_stage,
        groups=groups,
        dtype=config.train.dtype,
        seed=config.train.seed,
    )
    optimizer = NamedAdamW(dict(stage.named_parameters()), config.train)
    dataset = TokenDataset(
        _data_folder(run, config),
        seq_len=config.train.seq_len,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        vocab_size=config.model.vocab_size,
    )
    return _Trainer(config, stage, optimizer, dataset)


def _data_folder(run: Run, config: RunConfig) -> Path:
    """The token files; the default corpus is made by rank 0 where it is not there yet."""
    if config.data.path is not None:
        return Path(config.data.path).expanduser()
    import platform

    from slurm_pt.train.corpus import prepare_stdlib

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


# ------------------------------------------------------------------------------------ the process


def main() -> None:
    """One rank of a submitted run. Exits with the code of the contract, at once."""
    shield()
    run = open_run(sys.argv[1])
    spec = read_json(run.spec)
    from omegaconf import OmegaConf

    cfg = OmegaConf.load(run.config)
    run_program(lambda c: load_entry(spec["entry"])(c), cfg, exits=True)


def load_entry(entry: dict[str, str]) -> Callable[[Any], Any]:
    """The program of a run: a function of a module, or of a file that is imported as one.

    Never run as `__main__`: what it spawns must be able to import it again.
    """
    if "module" in entry:
        module = importlib.import_module(entry["module"])
    else:
        path = Path(entry["file"])
        sys.path.insert(0, str(path.parent))  # as `python file.py` does
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.exists():
            raise LaunchError(
                f"{path}: the program of this run is gone. Put it back, or submit again"
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    program: Callable[[Any], Any] = getattr(module, entry["function"])
    return program


if __name__ == "__main__":
    # The canonical module, not this copy of it: programs import slurm_pt.worker again.
    from slurm_pt import worker

    worker.main()
