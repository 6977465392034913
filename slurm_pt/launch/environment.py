"""Who this process is among the ranks, read from its environment. Pure.

`launchers` finds out who numbered the ranks; here that becomes a RankInfo, is compared with the
layout, and answers what a rank asks about itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_pt.errors import LaunchError
from slurm_pt.launch.launchers import (
    Launcher,
    as_ranges,
    choose_claim,
    is_in_step,
    read_integer,
)
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.submit.environment import slurm_job_key, slurm_requeue_key

__all__ = [
    "Launcher",
    "RankInfo",
    "affinity_warning",
    "check_world",
    "pick_device_index",
    "rank_host",
    "read_rank",
    "show_ranks",
    "torch_environment",
]


@dataclass(frozen=True)
class RankInfo:
    """The place of one process in its world."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    launcher: Launcher
    hosts: tuple[str, ...] = ()
    """Node names in node order; empty: the launcher does not tell."""
    ranks_per_node: tuple[int, ...] = ()
    """In node order, ranks numbered node after node; empty: the launcher does not tell."""
    job_id: str | None = None
    job_key: str | None = None
    """The job as squeue prints it: `ARRAY_TASK` for a task of an array."""
    requeue_key: str | None = None
    """The id that changes this job and no other."""
    step_id: str | None = None
    restart_count: int = 0
    """Slurm's, or torchrun's where there is no Slurm."""

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("rank", self.rank, self.world_size),
            ("local_rank", self.local_rank, self.local_world_size),
            ("node_rank", self.node_rank, self.num_nodes),
        ):
            if not 0 <= value < limit:
                raise LaunchError(
                    f"{name}={value} from {self.launcher.value} is not in 0..{limit - 1}. To fix: "
                    f"unset the variables that an outer launcher left in the environment."
                )
        if self.local_world_size > self.world_size or self.num_nodes > self.world_size:
            raise LaunchError(
                f"{self.launcher.value} tells of {self.world_size} ranks, "
                f"{self.local_world_size} of them here, on {self.num_nodes} nodes: these cannot "
                f"all be right. To fix: unset what an outer launcher left in the environment."
            )


def read_rank(environ: Mapping[str, str]) -> RankInfo:
    """The place of the process with this environment. Raises LaunchError rather than guess."""
    chosen = choose_claim(environ)
    return RankInfo(
        rank=chosen.rank,
        world_size=chosen.world_size,
        local_rank=chosen.local_rank,
        local_world_size=chosen.local_world_size,
        node_rank=chosen.node_rank,
        num_nodes=chosen.num_nodes,
        launcher=chosen.launcher,
        hosts=chosen.hosts,
        ranks_per_node=chosen.ranks_per_node,
        job_id=environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID"),
        job_key=slurm_job_key(environ),
        requeue_key=slurm_requeue_key(environ),
        step_id=environ["SLURM_STEP_ID"] if is_in_step(environ) else None,
        restart_count=_restart_count(environ),
    )


def check_world(
    info: RankInfo, layout: ParallelLayout, *, allow_tp_across_nodes: bool = False
) -> None:
    """Raises LaunchError if the ranks that run are not the ones that the layout needs."""
    found = f"{info.world_size} ranks run ({info.launcher.value}: {_show_counts(info)})"
    asked = f"parallel.tp={layout.tp} * parallel.pp={layout.pp} * parallel.dp={layout.dp}"
    if info.world_size != layout.world_size:
        dp, left_over = divmod(info.world_size, layout.tp * layout.pp)
        fit = f"parallel.dp={dp} fits these ranks" if dp and not left_over else "no dp fits these"
        if info.launcher is Launcher.single:
            raise LaunchError(
                f"{found}, but {asked} = {layout.world_size}. To fix: submit it with `-m "
                f"hydra/launcher=slurm_pt` (without Slurm that starts {layout.world_size} "
                f"processes here), or start it with `torchrun --nproc-per-node {layout.world_size} "
                f"PROGRAM ...`, or set parallel.tp/pp/dp for {info.world_size} ({fit}). In the "
                "shell of srun --pty, ask for one task."
            )
        raise LaunchError(
            f"{found}, but {asked} = {layout.world_size}. They must be equal; --ntasks-per-node "
            f"beside --ntasks is only a maximum. To fix: set slurm.nodes and srun's number of "
            f"tasks for {layout.world_size} ranks, or parallel.tp/pp/dp for {info.world_size} "
            f"({fit})."
        )
    if layout.tp == 1 or info.num_nodes == 1:
        return
    counts = info.ranks_per_node
    if not counts or len(set(counts)) > 1:
        raise LaunchError(
            f"{found} with parallel.tp={layout.tp}: with tensor parallelism every node must run "
            f"the same number of ranks. To fix: start a multiple of {layout.tp} ranks on each node "
            f"(--ntasks-per-node, slurm.nodes), or set parallel.tp=1."
        )
    if counts[0] % layout.tp and not allow_tp_across_nodes:
        raise LaunchError(
            f"{found} with parallel.tp={layout.tp}: a tensor group would straddle nodes, over a "
            f"link that is far slower than the one inside. To fix: set parallel.tp to a divisor of "
            f"{counts[0]}, or parallel.allow_tp_across_nodes=true if it is meant."
        )


def torch_environment(info: RankInfo, address: str, port: int) -> dict[str, str]:
    """The variables of torch's `env://` start, as torchrun sets them."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "GROUP_RANK": str(info.node_rank),
        "GROUP_WORLD_SIZE": str(info.num_nodes),
        "NODE_RANK": str(info.node_rank),
    }


def pick_device_index(visible: int, info: RankInfo) -> int:
    """Which visible GPU is this rank's. With GPUs bound per task each sees one, number 0."""
    if visible == 1:
        return 0
    if visible >= info.local_world_size:
        return info.local_rank
    raise LaunchError(
        f"rank {info.rank} on {rank_host(info, info.rank)} sees {visible} GPUs for "
        f"{info.local_world_size} ranks on its node. A rank must see one GPU, or one for each rank "
        f"of the node. To fix: set slurm.gpus_per_node={info.local_world_size} and no binding per "
        f"task, run fewer ranks per node, or set cluster.device=cpu."
    )


def rank_host(info: RankInfo, rank: int) -> str:
    """Where a rank runs, for messages: its node's name, or its node's number."""
    node = _node_of(info, rank)
    if node is None:
        return "an unknown node"
    return info.hosts[node] if info.hosts else f"node {node}"


def show_ranks(info: RankInfo, ranks: list[int], *, most_nodes: int = 20) -> str:
    """Ranks by node, for messages.

    >>> info = RankInfo(0, 4, 0, 2, 0, 2, Launcher.slurm, ("n01", "n02"), (2, 2))
    >>> show_ranks(info, [1, 2, 3])
    'rank 1 on n01; ranks 2-3 on n02'
    """
    by_node: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_node.setdefault(rank_host(info, rank), []).append(rank)
    parts = [
        f"rank{'s' if len(members) > 1 else ''} {as_ranges(members)} on {host}"
        for host, members in by_node.items()
    ]
    more = len(parts) - most_nodes
    return "; ".join(parts[:most_nodes]) + (f"; and {more} more nodes" if more > 0 else "")


def affinity_warning(requested_cpus: int | None, mask_size: int) -> str | None:
    """A sentence if a rank may use fewer CPUs than were asked for. Both numbers are per rank."""
    if requested_cpus is None or mask_size >= requested_cpus:
        return None
    return (
        f"this rank may run on {mask_size} of the slurm.cpus_per_task={requested_cpus} CPUs that "
        f"were asked for, and its data-loading workers share them: since Slurm 22.05 srun does not "
        f"take over sbatch's --cpus-per-task. To fix: give srun --cpus-per-task={requested_cpus} "
        f"too, or set slurm.cpu_bind=none."
    )


def _node_of(info: RankInfo, rank: int) -> int | None:
    if info.num_nodes == 1:
        return 0
    for node, count in enumerate(info.ranks_per_node):
        if rank < count:
            return node
        rank -= count
    return None


def _show_counts(info: RankInfo) -> str:
    """`4 on n01, 2 on n02`, as far as it is known and fits a line."""
    if not info.ranks_per_node:
        return f"on {info.num_nodes} nodes, {info.local_world_size} on this one"
    hosts = info.hosts or tuple(f"node {node}" for node in range(info.num_nodes))
    counts = [f"{count} on {host}" for host, count in zip(hosts, info.ranks_per_node, strict=True)]
    more = f" and {len(counts) - 16} more nodes" if len(counts) > 16 else ""
    return ", ".join(counts[:16]) + more


def _restart_count(environ: Mapping[str, str]) -> int:
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        if name in environ:
            return read_integer(environ, name)
    return 0
