"""The configuration files of a development cluster, as text. Pure: nothing is read or written.

Accepted by Slurm 22.05 (Debian 12) and 24.11 (Debian 13); a comment says where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_pt.devcluster.config import DevClusterConfig
    from slurm_pt.devcluster.paths import ClusterPaths

CLUSTER_NAME = "devcluster"
_DATABASE = "slurm_acct_db"


@dataclass(frozen=True)
class Site:
    """What the machine decides about a cluster, and the configuration cannot know."""

    hostname: str
    """The short host name: the controller refuses to run under any other."""
    user: str
    """Who runs the daemons."""
    controller_port: int
    database_port: int
    node_ports: tuple[int, ...]
    slurm_version: str
    """Such as 22.05.8."""
    node_hostnames: bool
    """Whether each node gets a host name of its own."""


def render_slurm_conf(config: DevClusterConfig, paths: ClusterPaths, site: Site) -> str:
    """slurm.conf; lines of `config.extra_slurm_conf` replace ours where they set the same thing."""
    lines = [
        *_daemon_lines(paths, site),
        *_scheduling_lines(config),
        *_preemption_lines(config),
        *_accounting_lines(config, paths, site),
        *_node_lines(config, site),
        *_partition_lines(config),
    ]
    theirs = {_setting(line) for line in config.extra_slurm_conf}
    kept = [line for line in lines if _setting(line) not in theirs]
    return "\n".join([*kept, *config.extra_slurm_conf, ""])


def _setting(line: str) -> str:
    """What a line sets, for comparison: `key`, or `nodename=n1` where a key may come often."""
    key, _, value = line.strip().lower().partition("=")
    if key in {"nodename", "partitionname"}:
        return f"{key}={value.split(maxsplit=1)[0] if value else ''}"
    return key.strip()


def _daemon_lines(paths: ClusterPaths, site: Site) -> list[str]:
    return [
        f"ClusterName={CLUSTER_NAME}",
        # The name must be the machine's; the address keeps it from ever being looked up.
        f"SlurmctldHost={site.hostname}(127.0.0.1)",
        f"SlurmctldPort={site.controller_port}",
        f"SlurmUser={site.user}",
        f"SlurmdUser={site.user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        # A requeued job may not start before its old credential has expired (120 s by default).
        f"AuthInfo=socket={paths.munge_socket},cred_expire=5",
        f"StateSaveLocation={paths.controller_state}",
        f"SlurmdSpoolDir={paths.spool}/%n",
        f"SlurmctldPidFile={paths.run}/slurmctld.pid",
        f"SlurmdPidFile={paths.run}/slurmd-%n.pid",
        f"SlurmctldLogFile={paths.log('slurmctld')}",
        f"SlurmdLogFile={paths.logs}/slurmd-%n.log",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
        # Without this a node is refused for having fewer CPUs than it pretends.
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        # task/none has no plugin file in 24.11, but both releases know the name.
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/linux",
        "MpiDefault=none",
        # No job of a pretended cluster should write a real letter.
        "MailProg=/bin/true",
        "ReturnToService=2",
        # A node that dies is noticed within a minute, and a machine that is merely busy is not.
        "SlurmdTimeout=60",
        "MessageTimeout=20",
    ]


def _scheduling_lines(config: DevClusterConfig) -> list[str]:
    return [
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"DefMemPerCPU={max(1, config.memory_mib // config.cpus_per_node)}",
        f"KillWait={config.kill_wait_s}",
        f"MinJobAge={config.min_job_age_s}",
        f"MaxArraySize={config.max_array_size}",
        "JobRequeue=1",
    ]


def _preemption_lines(config: DevClusterConfig) -> list[str]:
    lines = []
    if config.send_user_signal:
        # The name in 22.05 and 24.11; `PreemptParameters=send_user_signal` does not exist.
        lines.append("SlurmctldParameters=preempt_send_user_signal")
    if config.preempt_type == "partition":
        plugin = "preempt/partition_prio"
    elif config.accounting:
        plugin = "preempt/qos"
    else:
        return [*lines, "PreemptType=preempt/none", "PreemptMode=OFF"]
    return [*lines, f"PreemptType={plugin}", f"PreemptMode={config.preempt_mode.upper()}"]


def _accounting_lines(config: DevClusterConfig, paths: ClusterPaths, site: Site) -> list[str]:
    gres = ["GresTypes=gpu"] if config.gpus_per_node else []
    if not config.accounting:
        return [
            *gres,
            "AccountingStorageType=accounting_storage/none",
            "PriorityType=priority/basic",
        ]
    tres = ["AccountingStorageTRES=gres/gpu"] if config.gpus_per_node else []
    return [
        *gres,
        *tres,
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={site.database_port}",
        # Every client of slurmdbd finds munge through this, not through AuthInfo.
        f"AccountingStoragePass={paths.munge_socket}",
        "AccountingStorageEnforce=associations,limits,qos",
        "PriorityType=priority/multifactor",
        "PriorityWeightQOS=1000",
    ]


def _node_lines(config: DevClusterConfig, site: Site) -> list[str]:
    gres = f" Gres=gpu:{config.gpu_type}:{config.gpus_per_node}" if config.gpus_per_node else ""
    return [
        f"NodeName={name} NodeHostname={name if site.node_hostnames else site.hostname}"
        f" NodeAddr={config.node_address(name)} Port={port}"
        f" CPUs={config.cpus_per_node} RealMemory={config.memory_mib}{gres} State=UNKNOWN"
        for name, port in zip(config.node_names, site.node_ports, strict=True)
    ]


def _partition_lines(config: DevClusterConfig) -> list[str]:
    default_time = f" DefaultTime={config.default_time}" if config.default_time else ""
    if config.preempt_type == "qos":
        tier, variants = "", []
    else:
        tier = " PriorityTier=5 PreemptMode=OFF"
        variants = [
            "PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1"
            f" PreemptMode={config.preempt_mode.upper()} GraceTime={config.grace_time_s}"
            f"{default_time}",
            "PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10"
            f" PreemptMode=OFF{default_time}",
        ]
    return [
        f"PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP{tier}{default_time}",
        f"PartitionName=debug Nodes=ALL MaxTime=10 State=UP{tier}",
        *variants,
    ]


def render_gres_conf(config: DevClusterConfig, paths: ClusterPaths) -> str:
    """gres.conf. Without `File=` a node registers no GPU at all and is drained."""
    if not config.gpus_per_node:
        return "AutoDetect=off\n"
    numbers = "0" if config.gpus_per_node == 1 else f"[0-{config.gpus_per_node - 1}]"
    return (
        "AutoDetect=off\n"
        f"Name=gpu Type={config.gpu_type} Count={config.gpus_per_node}"
        f" File={paths.gpus}/nvidia{numbers}\n"
    )


def render_cgroup_conf(site: Site) -> str:
    """cgroup.conf, such that slurmd leaves the machine's control groups alone.

    24.11 would ask systemd over D-Bus for a group. 22.05 does not know `disabled`, but its
    cgroup/v1 does nothing until another plugin asks for it, on machines with version 2 as well.
    """
    plugin = "disabled" if parse_release(site.slurm_version) >= (23, 11) else "cgroup/v1"
    return f"CgroupPlugin={plugin}\n"


def parse_release(version: str) -> tuple[int, int]:
    """(22, 5) from 22.05.8; (0, 0) from what is no version."""
    numbers = version.split(".")
    if len(numbers) < 2 or not (numbers[0].isdigit() and numbers[1].isdigit()):
        return (0, 0)
    return int(numbers[0]), int(numbers[1])


def render_slurmdbd_conf(paths: ClusterPaths, site: Site) -> str:
    """slurmdbd.conf; slurmdbd refuses to start unless the file's mode is 600."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={paths.munge_socket}",
            # A bare 127.0.0.1 as DbdHost is refused.
            f"DbdHost={site.hostname}",
            "DbdAddr=127.0.0.1",
            f"DbdPort={site.database_port}",
            f"SlurmUser={site.user}",
            "StorageType=accounting_storage/mysql",
            # localhost means the Unix socket that MYSQL_UNIX_PORT names: no TCP port at all.
            "StorageHost=localhost",
            f"StorageLoc={_DATABASE}",
            f"StorageUser={site.user}",
            f"LogFile={paths.log('slurmdbd')}",
            f"PidFile={paths.run}/slurmdbd.pid",
            "DebugLevel=info",
            "",
        ]
    )


def render_mariadb_conf(paths: ClusterPaths, site: Site) -> str:
    """MariaDB's configuration: small, quick, and not meant to survive a power cut."""
    return "\n".join(
        [
            "[mysqld]",
            f"datadir={paths.database_data}",
            f"socket={paths.database_socket}",
            f"pid-file={paths.database}/mariadb.pid",
            f"tmpdir={paths.database}",
            f"user={site.user}",
            "skip-networking",
            # The socket lies in a folder that only its owner may enter.
            "skip-grant-tables",
            "innodb_buffer_pool_size=64M",
            "innodb_log_file_size=16M",
            "innodb_lock_wait_timeout=900",
            "innodb_flush_log_at_trx_commit=0",
            "innodb_doublewrite=0",
            "performance_schema=off",
            f"init-file={paths.mariadb_init}",
            "",
        ]
    )


def render_mariadb_init() -> str:
    """What MariaDB runs at its start, before anybody may connect.

    slurmdbd 24.11 with MariaDB 11.8 makes the database itself, and then ends with "null result
    from query": it only works with a database that is there already.
    """
    return f"CREATE DATABASE IF NOT EXISTS {_DATABASE};\n"


def render_hosts(config: DevClusterConfig, machine_hosts: str) -> str:
    """/etc/hosts as the nodes see it: the machine's own, and a name for every node."""
    nodes = "".join(f"{config.node_address(name)} {name}\n" for name in config.node_names)
    return f"{machine_hosts.rstrip()}\n{nodes}"
