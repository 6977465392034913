"""What a development cluster looks like: how many nodes, which preemption, which extra lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

PreemptType = Literal["qos", "partition"]
PreemptMode = Literal["requeue", "cancel"]

_MAX_NODES = 250
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class DevClusterConfig:
    """The options of one development cluster; every default gives a cluster that tests can use."""

    nodes: int = 4
    """Node daemons, named n1, n2, ..."""
    cpus_per_node: int = 8
    """Pretended: may be more than the machine has."""
    memory_mib: int = 8000
    """Memory of each node, pretended like the CPUs."""
    gpus_per_node: int = 0
    """Pretend GPUs: Slurm hands them out, but no driver stands behind them."""
    gpu_type: str = "a100"
    """The type in `--gres=gpu:TYPE:N`."""
    preempt_type: PreemptType = "qos"
    """qos: QoS high preempts low (needs accounting). partition: partition high preempts low."""
    preempt_mode: PreemptMode = "requeue"
    """What Slurm does with a preempted job that is still there after the grace."""
    grace_time_s: int = 15
    """Seconds between the warning and the end of a preempted job. 0 is Slurm's own default."""
    kill_wait_s: int = 5
    """Seconds between TERM and KILL. Slurm has been seen to take no less than 5."""
    send_user_signal: bool = False
    """Send the signal of `--signal` at a preemption, instead of TERM."""
    accounting: bool = True
    """Start the accounting database. Without it: no QoS, no sacct, no preemption by QoS."""
    accounts: Sequence[str] = ("demo",)
    """Accounts to create; the first is everybody's default."""
    users: Sequence[str] = ()
    """Users to admit beside root and whoever starts the cluster."""
    default_time: str = ""
    """Time limit of a job that asks for none, in Slurm's notation. Empty: the partition's limit."""
    min_job_age_s: int = 300
    """Seconds for which `squeue` and `scontrol` remember a job that has ended."""
    max_array_size: int = 1001
    """One more than the largest index of a job array."""
    node_hostnames: bool = True
    """Let each node have a host name of its own that resolves, where the machine allows it."""
    extra_slurm_conf: Sequence[str] = ()
    """Lines for slurm.conf. A key that is also set by us is set by yours alone."""

    def __post_init__(self) -> None:
        for name in ("accounts", "users", "extra_slurm_conf"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise DevClusterError(
                    f"{name}={value!r} is a text, but must be a list of texts. To fix: [{value!r}]."
                )
            object.__setattr__(self, name, tuple(value))
        self._refuse_bad_numbers()
        self._refuse_bad_words()

    def _refuse_bad_numbers(self) -> None:
        lowest = {
            "nodes": 1,
            "cpus_per_node": 1,
            "memory_mib": 1,
            "gpus_per_node": 0,
            "grace_time_s": 0,
            "kill_wait_s": 0,
            "min_job_age_s": 2,
            "max_array_size": 2,
        }
        for name, minimum in lowest.items():
            if getattr(self, name) < minimum:
                raise DevClusterError(
                    f"{name}={getattr(self, name)}, but it must be {minimum} or more. "
                    f"To fix: {name}={minimum}."
                )
        if self.nodes > _MAX_NODES:
            raise DevClusterError(
                f"nodes={self.nodes}, but one machine is given {_MAX_NODES} node daemons at most. "
                f"To fix: nodes={_MAX_NODES}."
            )

    def _refuse_bad_words(self) -> None:
        for name, choices in {
            "preempt_type": ("qos", "partition"),
            "preempt_mode": ("requeue", "cancel"),
        }.items():
            if getattr(self, name) not in choices:
                raise DevClusterError(
                    f"{name}={getattr(self, name)!r}, but it must be one of "
                    f"{', '.join(choices)}. To fix: {name}={choices[0]}."
                )
        if not _NAME.fullmatch(self.gpu_type):
            raise DevClusterError(
                f"gpu_type={self.gpu_type!r}, but Slurm wants lower-case letters and digits. "
                f"To fix: gpu_type=a100."
            )
        if self.accounting and not self.accounts:
            raise DevClusterError(
                "accounts is empty, but with accounting every user needs one. "
                "To fix: accounts=demo, or accounting off."
            )

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of all nodes, in Slurm's order."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def node_address(self, name: str) -> str:
        """The loopback address of node `name`; each node has one of its own."""
        number = self.node_names.index(name)
        return f"127.0.{1 + number // 250}.{1 + number % 250}"
