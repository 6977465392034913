"""The start of a rank, which every loop needs, ours or the user's.

Who am I, is the world right, are all there and alike, which folder and attempt: only then torch,
the device and the process groups. So a wrong world is refused before torch is imported.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_pt.config import JobConfig, RunConfig, read_job_config
from slurm_pt.errors import LaunchError, RunFinishedError, RunFolderError, SlurmPtError
from slurm_pt.files import read_json
from slurm_pt.launch.attempt import begin_attempt
from slurm_pt.launch.environment import RankInfo, check_world, read_rank, torch_environment
from slurm_pt.launch.preemption import StopRequest, listen
from slurm_pt.monitor.progress import JobComment, make_heartbeat
from slurm_pt.plan import Plan, make_plan
from slurm_pt.run import Run, owner_nonce, say
from slurm_pt.run_dir import AttemptDir, RunDir
from slurm_pt.run_inputs import create_run, make_folders, run_dir_of
from slurm_pt.session import current_run
from slurm_pt.submit.slurm import SlurmClient

if TYPE_CHECKING:
    from slurm_pt.launch.hello import Hello
    from slurm_pt.launch.rendezvous import Meeting


def start(cfg: Any) -> Run:
    """Brings this rank into its run: ranks, process groups, run folder, the wish to stop.

    Works the same under `python`, `torchrun`, `srun` and the jobs that slurm_pt submits. `cfg` is
    the Hydra configuration; of it the keys of JobConfig are read, the rest is yours.

    Raises:
        LaunchError: the world is not the one that the configuration asks for.
        RunFolderError: the folder cannot be written, or another job writes it.
    """
    config = read_job_config(cfg)
    return start_run(cfg, config)


class Clock:
    """Seconds of each part of the start."""

    def __init__(self) -> None:
        self.parts_s: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.parts_s[part] = round(now - self._last, 3)
        self._last = now


def start_run(cfg: Any, config: JobConfig) -> Run:
    """The same for a configuration that was read already."""
    clock = Clock()
    by_hand = "SLURM_PT_ATTEMPT_DIR" not in os.environ
    request = listen(at_a_terminal=by_hand)
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
    if by_hand and info.rank == 0:
        say(f"run folder: {folder.path}")
    clock.lap("rendezvous")
    device = _device(config, info)
    clock.lap("imports")
    _join(meeting, config, info, device)
    from slurm_pt.parallel.groups import create_groups

    timeout_s = config.cluster.collective_timeout_s
    groups = create_groups(
        plan.layout,
        rank=info.rank,
        device=device,
        timeout_s=timeout_s,
        kv_heads=config.model.kv_heads if isinstance(config, RunConfig) else None,
    )
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
        by_hand=by_hand,
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
    from slurm_pt.launch.code import digest_code
    from slurm_pt.launch.environment import affinity_warning
    from slurm_pt.launch.gpus import own_gpu
    from slurm_pt.launch.hello import make_hello
    from slurm_pt.launch.network import list_interfaces, validate_interface_settings
    from slurm_pt.launch.rendezvous import launch_key, meet

    problem: str | None = None
    devices: tuple[str, ...] = ()
    try:
        validate_interface_settings(os.environ, list_interfaces())
        devices = own_gpu(info, os.environ, config.cluster.device)
    except LaunchError as error:
        problem = str(error)  # told to all ranks, so that the message is the same everywhere
    hello = make_hello(
        info,
        code_digest=digest_code(_program(folder)),
        config_signature=folder.name,
        devices=devices,
        problem=problem,
    )
    if warning := affinity_warning(config.slurm.cpus_per_task, hello.affinity_cpus):
        say(warning)
    return meet(
        info,
        folder=folder.attempts,
        launch_key=launch_key(info, os.environ),
        hello=hello,
        timeout_s=config.cluster.start_timeout_s,
        interface=config.cluster.interface,
        log=say,
        stop_requested=request.is_set,
        agree=agree,
    )


def _program(folder: RunDir) -> Path | None:
    """The user's program, where it is a file."""
    if "SLURM_PT_RUN_DIR" not in os.environ:
        return Path(sys.argv[0])
    file = (read_json(folder.spec)["entry"] or {}).get("file")
    return None if file is None else Path(file)


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
        # For libraries that look for torchrun's variables, as DeepSpeed does.
        os.environ.update(torch_environment(info, meeting.address, meeting.port))
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
        make_folders(folder)
        attempt = begin_attempt(folder)
        if attempt is not None and not folder.spec.exists():
            # Only now, as the owner, and never over the inputs of a job that was submitted.
            spec = {"entry": None, "overrides": sys.argv[1:], "cwd": str(Path.cwd())}
            create_run(folder, cfg=cfg, spec=spec, plan=plan.as_json())
    except SlurmPtError as error:
        return {"refused": str(error)}
    if attempt is None:
        return {"finished": f"{folder.path} is finished; its done.json says how it went"}
    return {"attempt": str(attempt.path)}
