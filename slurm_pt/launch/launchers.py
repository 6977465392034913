"""What each launcher says about a process, and whether two of them agree. Pure.

Looked for in this order: our own (SLURM_PT_RANK ...), torchrun, MPI, the Slurm *step*. A step, not
a job: the batch shell has SLURM_PROCID=0 although it is no task, and salloc's shell has
SLURM_NTASKS without any rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from slurm_pt.errors import LaunchError
from slurm_pt.launch.node_list import HOSTS_VARIABLE, expand_counts, expand_node_list, parse_hosts

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers the batch, extern and interactive steps from here on; they hold no tasks."""


class Launcher(Enum):
    """What started this process and numbered it."""

    explicit = "explicit"
    torchrun = "torchrun"
    mpi = "mpi"
    slurm = "slurm"
    single = "single"


@dataclass(frozen=True)
class Claim:
    """What one launcher says about this process."""

    launcher: Launcher
    variables: Mapping[str, str]
    """Those that it was read from, for messages."""
    rank: int
    world_size: int
    num_nodes: int = 0
    node_rank: int = -1
    local_rank: int = -1
    local_world_size: int = 0
    hosts: tuple[str, ...] = ()
    ranks_per_node: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.local_world_size > 0

    def __str__(self) -> str:
        return f"{self.launcher.value} ({show(self.variables)})"


def choose_claim(environ: Mapping[str, str]) -> Claim:
    """The launcher to believe; LaunchError if two do not fit together. Without one: alone."""
    read = (_read_explicit, _read_torchrun, _read_mpi, _read_slurm_step)
    claims = [claim for reader in read if (claim := reader(environ)) is not None]
    alone = Claim(Launcher.single, {}, 0, 1, 1, 0, 0, 1, ranks_per_node=(1,))
    chosen = next((claim for claim in claims if claim.is_whole), claims[0] if claims else alone)
    if not chosen.is_whole:
        raise LaunchError(
            f"{chosen}: rank and size are set, the place on the node is not. All of it is needed. "
            f"To fix: unset {' and '.join(chosen.variables)} to let srun number the ranks, or set "
            f"LOCAL_RANK and LOCAL_WORLD_SIZE too."
        )
    for inner, outer in pairwise(claims):
        _refuse_disagreement(inner, outer, environ)
    if HOSTS_VARIABLE in environ:
        hosts = parse_hosts(environ[HOSTS_VARIABLE])
        _check_length(hosts, chosen, HOSTS_VARIABLE)
        return replace(chosen, hosts=hosts)
    return chosen


def _read_explicit(environ: Mapping[str, str]) -> Claim | None:
    parts = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES")
    names = tuple(f"SLURM_PT_{part}" for part in parts)
    present = [name for name in names if name in environ]
    if not present:
        return None
    missing = [name for name in names if name not in environ]
    if missing:
        raise LaunchError(
            f"{show(_pick(environ, present))} set, {', '.join(missing)} not. The six "
            f"belong together. To fix: set all of them, or none."
        )
    rank, world_size, local_rank, local_world_size, node_rank, num_nodes = (
        read_integer(environ, name) for name in names
    )
    return Claim(
        launcher=Launcher.explicit,
        variables=_pick(environ, names),
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        ranks_per_node=_even_counts(world_size, local_world_size, num_nodes),
    )


def _read_torchrun(environ: Mapping[str, str]) -> Claim | None:
    """torchrun, and scripts that set RANK, WORLD_SIZE ... by hand."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        if "TORCHELASTIC_RUN_ID" in environ:
            raise LaunchError(
                "TORCHELASTIC_RUN_ID is set, RANK or WORLD_SIZE is not: torchrun sets all of "
                "them. To fix: unset TORCHELASTIC_RUN_ID, or keep what torchrun sets."
            )
        return None
    rank, world_size = read_integer(environ, "RANK"), read_integer(environ, "WORLD_SIZE")
    variables = _pick(environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if "LOCAL_RANK" not in environ or "LOCAL_WORLD_SIZE" not in environ:
        if world_size == 1:
            return Claim(Launcher.torchrun, variables, 0, 1, 1, 0, 0, 1, ranks_per_node=(1,))
        return Claim(Launcher.torchrun, variables, rank, world_size)
    local_world_size = read_integer(environ, "LOCAL_WORLD_SIZE")
    if "GROUP_RANK" in environ and "GROUP_WORLD_SIZE" in environ:
        node_rank = read_integer(environ, "GROUP_RANK")
        num_nodes = read_integer(environ, "GROUP_WORLD_SIZE")
    else:
        node_rank, num_nodes = _even_node(rank, world_size, local_world_size, variables)
    return Claim(
        launcher=Launcher.torchrun,
        variables=variables,
        rank=rank,
        world_size=world_size,
        local_rank=read_integer(environ, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        ranks_per_node=_even_counts(world_size, local_world_size, num_nodes),
    )


def _read_mpi(environ: Mapping[str, str]) -> Claim | None:
    """Open MPI's mpirun, then MPICH's and Intel's. OMPI_COMM_WORLD_NODE_RANK is no node rank."""
    ompi = tuple(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    for names in (ompi, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")):
        if names[0] not in environ or names[1] not in environ:
            continue
        variables = _pick(environ, names)
        rank, world_size = read_integer(environ, names[0]), read_integer(environ, names[1])
        if len(variables) < len(names):  # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE alone
            return Claim(Launcher.mpi, variables, rank, world_size)
        local_rank, local_world_size = (
            read_integer(environ, names[2]),
            read_integer(environ, names[3]),
        )
        node_rank, num_nodes = _even_node(rank, world_size, local_world_size, variables)
        if rank != node_rank * local_world_size + local_rank:
            raise LaunchError(
                f"mpi ({show(variables)}): the ranks are not numbered node after node, as "
                f"tensor groups need. To fix: mpirun --map-by slot, or start with srun."
            )
        counts = _even_counts(world_size, local_world_size, num_nodes)
        place = (num_nodes, node_rank, local_rank, local_world_size)
        return Claim(Launcher.mpi, variables, rank, world_size, *place, ranks_per_node=counts)
    return None


def _read_slurm_step(environ: Mapping[str, str]) -> Claim | None:
    if not is_in_step(environ):
        return None
    names = (
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
        *("SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
    )
    missing = [name for name in names if name not in environ]
    if missing:
        raise LaunchError(
            f"SLURM_STEP_ID={environ['SLURM_STEP_ID']} is set, {', '.join(missing)} not: the "
            f"environment of a step has all of them. To fix: pass Slurm's variables on whole (into "
            f"a container too), or unset SLURM_STEP_ID to run as a single process."
        )
    rank, world_size, num_nodes, node_rank, local_rank = (
        read_integer(environ, name) for name in names[:5]
    )
    _refuse_stale_step(environ)
    counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    claim = Claim(
        launcher=Launcher.slurm,
        variables=_pick(environ, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")),
        rank=rank,
        world_size=world_size,
        num_nodes=num_nodes,
        node_rank=node_rank,
        local_rank=local_rank,
        local_world_size=counts[node_rank] if node_rank < len(counts) else 1,
        hosts=() if HOSTS_VARIABLE in environ else _step_hosts(environ),
        ranks_per_node=counts,
    )
    _check_step(claim, environ)
    return claim


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a task of a step, or a child of one; batch and interactive steps are none."""
    step_id = environ.get("SLURM_STEP_ID")
    if step_id is None:
        return False
    return step_id.isdecimal() and int(step_id) < _FIRST_SPECIAL_STEP


def _step_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The step's nodes; refused when a heterogeneous job runs in part."""
    hosts = expand_node_list(environ["SLURM_STEP_NODELIST"])
    if "SLURM_HET_SIZE" in environ:
        groups = {
            name: value
            for name, value in environ.items()
            if name.startswith("SLURM_JOB_NODELIST_HET_GROUP_")
        }
        whole = {host for value in groups.values() for host in expand_node_list(value)}
        if len(groups) != read_integer(environ, "SLURM_HET_SIZE") or whole != set(hosts):
            raise LaunchError(
                f"heterogeneous job: not supported in part. This step runs on {', '.join(hosts)}, "
                f"the job has {show(groups)}. To fix: srun --het-group=0-"
                f"{read_integer(environ, 'SLURM_HET_SIZE') - 1}, or one component."
            )
    return hosts


def _refuse_stale_step(environ: Mapping[str, str]) -> None:
    """Refuses a step's variables in a shell that is no task of it.

    A job that is submitted from inside a step inherits the outer SLURM_STEP_* in its batch shell,
    next to its own SLURM_NTASKS and SLURM_TASKS_PER_NODE (seen in 22.05.8).
    """
    for step_name, job_name in (
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NPROCS"),
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ):
        if job_name in environ and environ[step_name] != environ[job_name]:
            raise LaunchError(
                f"{step_name}={environ[step_name]} but {job_name}={environ[job_name]}: in a task "
                f"of a step they are the same. These are left over from the step that submitted "
                f"this job, or were changed by hand. To fix: start the ranks with srun, submit "
                f"with slurm-pt (it cleans the environment), or unset SLURM_STEP_ID."
            )


def _check_step(claim: Claim, environ: Mapping[str, str]) -> None:
    """Refuses a step whose variables contradict each other or number the ranks across nodes."""
    counts, tasks = claim.ranks_per_node, environ["SLURM_STEP_TASKS_PER_NODE"]
    if sum(counts) != claim.world_size or not claim.node_rank < len(counts) == claim.num_nodes:
        raise LaunchError(
            f"SLURM_NODEID={claim.node_rank}, SLURM_STEP_TASKS_PER_NODE={tasks} is "
            f"{sum(counts)} tasks on {len(counts)} nodes, but "
            f"SLURM_STEP_NUM_TASKS={claim.world_size} and SLURM_STEP_NUM_NODES={claim.num_nodes}. "
            f"To fix: start the ranks with srun, which sets all four."
        )
    if claim.hosts:
        _check_length(claim.hosts, claim, "SLURM_STEP_NODELIST")
        name = environ.get("SLURMD_NODENAME", claim.hosts[claim.node_rank])
        if name != claim.hosts[claim.node_rank]:
            raise LaunchError(
                f"SLURMD_NODENAME={name}, but node {claim.node_rank} of "
                f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} is "
                f"{claim.hosts[claim.node_rank]}. To fix: start the ranks with srun."
            )
    first = sum(counts[: claim.node_rank])
    here = list(range(first, first + counts[claim.node_rank]))
    listed = environ.get("SLURM_GTIDS", ",".join(str(rank) for rank in here))
    if claim.rank != first + claim.local_rank or listed != ",".join(str(rank) for rank in here):
        raise LaunchError(
            f"rank {claim.rank} is task {claim.local_rank} of node {claim.node_rank}, which runs "
            f"ranks {listed}; SLURM_STEP_TASKS_PER_NODE={tasks} and block numbering give it "
            f"{as_ranges(here)}. Ranks must be numbered node after node, so that tensor groups "
            f"are neighbours. To fix: srun --distribution=block."
        )


def _refuse_disagreement(inner: Claim, outer: Claim, environ: Mapping[str, str]) -> None:
    """Refuses two launchers of which one does not fit into the other.

    They fit if they number the same ranks, or if the outer one started at most one process for
    each node of the inner one (`srun torchrun`, mpirun's daemons).
    """
    same = inner.world_size == outer.world_size and inner.rank == outer.rank
    nested = outer.world_size <= inner.num_nodes
    # The shell of `srun --pty -n4 bash` is task 0 of 4, and the other three have left.
    by_hand = outer.launcher is Launcher.slurm and "SLURM_PTY_PORT" in environ
    if same or nested or by_hand:
        return
    raise LaunchError(
        f"two launchers number this process and do not agree: {inner} and {outer}. One of "
        f"them must number the ranks. To fix: start the ranks either with srun alone or with one "
        f"{inner.launcher.value} process per node, or unset {' '.join(inner.variables)}."
    )


# ------------------------------------------------------------------------------- small pieces


def _even_node(
    rank: int, world_size: int, local_world_size: int, variables: Mapping[str, str]
) -> tuple[int, int]:
    """Node rank and number of nodes where the launcher gives only sizes."""
    if local_world_size < 1 or world_size % local_world_size:
        raise LaunchError(
            f"{show(variables)}: {world_size} ranks cannot be {local_world_size} on each node. "
            f"To fix: start the same number of ranks on every node, or start with srun."
        )
    return rank // local_world_size, world_size // local_world_size


def _even_counts(world_size: int, local_world_size: int, num_nodes: int) -> tuple[int, ...]:
    """Ranks per node if they are even; torchrun does not tell when they are not."""
    even = local_world_size * num_nodes == world_size and num_nodes > 0
    return (local_world_size,) * num_nodes if even else ()


def _check_length(hosts: tuple[str, ...], claim: Claim, variable: str) -> None:
    if len(hosts) != claim.num_nodes:
        raise LaunchError(
            f"{variable} names {len(hosts)} hosts ({', '.join(hosts[:20])}), but {claim} runs on "
            f"{claim.num_nodes} nodes. To fix: give one name for each node in {HOSTS_VARIABLE}, or "
            f"unset it."
        )


def read_integer(environ: Mapping[str, str], name: str) -> int:
    """The number in a variable that is there."""
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise LaunchError(
            f"{name}={text!r} is not a whole number. To fix: unset {name}, or let the launcher "
            f"set it."
        )
    return int(text)


def _pick(environ: Mapping[str, str], names: tuple[str, ...] | list[str]) -> dict[str, str]:
    return {name: environ[name] for name in names if name in environ}


def show(variables: Mapping[str, str]) -> str:
    """`RANK=3, WORLD_SIZE=8`."""
    return ", ".join(f"{name}={value}" for name, value in variables.items())


def as_ranges(numbers: list[int]) -> str:
    """`0-3,5` for ascending numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
