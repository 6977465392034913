import pytest

from slurm_pt.devcluster import DevClusterConfig
from slurm_pt.devcluster.accounting import render_setup
from slurm_pt.devcluster.paths import paths_in
from slurm_pt.devcluster.render import (
    Site,
    parse_release,
    render_cgroup_conf,
    render_gres_conf,
    render_hosts,
    render_slurm_conf,
)


def make_site(config: DevClusterConfig, version: str = "22.05.8") -> Site:
    return Site(
        hostname="box",
        user="root",
        controller_port=1,
        database_port=2,
        node_ports=tuple(range(10, 10 + config.nodes)),
        slurm_version=version,
        node_hostnames=True,
    )


def slurm_conf(**options) -> list[str]:
    config = DevClusterConfig(**options)
    return render_slurm_conf(config, paths_in("/tmp/x"), make_site(config)).splitlines()


def test_a_line_of_the_users_replaces_ours_for_the_same_key():
    lines = slurm_conf(extra_slurm_conf=["killwait=9", "Prolog=/bin/true"])
    assert [line for line in lines if line.lower().startswith("killwait=")] == ["killwait=9"]
    assert lines[-1] == "Prolog=/bin/true"


def test_a_partition_of_the_users_replaces_only_ours_of_the_same_name():
    lines = slurm_conf(
        extra_slurm_conf=["PartitionName=debug Nodes=n1", "PartitionName=x Nodes=n2"]
    )
    partitions = [line.split()[0] for line in lines if line.startswith("PartitionName")]
    assert partitions == ["PartitionName=main", "PartitionName=debug", "PartitionName=x"]


def test_preemption_by_partition_gives_a_low_and_a_high_partition():
    lines = slurm_conf(preempt_type="partition", grace_time_s=7, preempt_mode="cancel")
    assert "PreemptType=preempt/partition_prio" in lines
    low = next(line for line in lines if line.startswith("PartitionName=low "))
    assert "PreemptMode=CANCEL" in low
    assert "GraceTime=7" in low
    assert any(line.startswith("PartitionName=high ") for line in lines)


def test_without_accounting_there_is_no_preemption_by_qos():
    lines = slurm_conf(accounting=False)
    assert "PreemptType=preempt/none" in lines
    assert "AccountingStorageType=accounting_storage/none" in lines


def test_the_default_time_limit_goes_to_the_main_partition():
    lines = slurm_conf(default_time="30")
    assert "DefaultTime=30" in next(line for line in lines if line.startswith("PartitionName=main"))


def test_each_node_has_its_own_name_address_and_port():
    nodes = [line for line in slurm_conf(nodes=2) if line.startswith("NodeName")]
    assert nodes[0].startswith("NodeName=n1 NodeHostname=n1 NodeAddr=127.0.1.1 Port=10 ")
    assert nodes[1].startswith("NodeName=n2 NodeHostname=n2 NodeAddr=127.0.1.2 Port=11 ")


@pytest.mark.parametrize(
    ("version", "plugin"),
    [("22.05.8", "cgroup/v1"), ("23.11.4", "disabled"), ("24.11.5", "disabled")],
)
def test_control_groups_are_left_alone_in_each_releases_own_words(version, plugin):
    site = make_site(DevClusterConfig(), version)
    assert render_cgroup_conf(site) == f"CgroupPlugin={plugin}\n"


@pytest.mark.parametrize(
    ("text", "release"), [("22.05.8", (22, 5)), ("24.11.5-Debian", (24, 11)), ("unknown", (0, 0))]
)
def test_a_release_is_the_first_two_numbers_of_a_version(text, release):
    assert parse_release(text) == release


def test_gpus_are_numbered_files():
    paths = paths_in("/tmp/x")
    assert "File=/tmp/x/gpu/nvidia[0-7]" in render_gres_conf(
        DevClusterConfig(gpus_per_node=8), paths
    )
    assert "File=/tmp/x/gpu/nvidia0\n" in render_gres_conf(DevClusterConfig(gpus_per_node=1), paths)
    assert "File" not in render_gres_conf(DevClusterConfig(), paths)


def test_hosts_keeps_the_machines_lines_and_adds_the_nodes():
    hosts = render_hosts(DevClusterConfig(nodes=2), "127.0.0.1 localhost\n")
    assert hosts == "127.0.0.1 localhost\n127.0.1.1 n1\n127.0.1.2 n2\n"


def test_users_are_admitted_once_each_to_all_accounts():
    config = DevClusterConfig(accounts=("a", "b"), users=("eve", "root"))
    setup = render_setup(config, starter="root")
    assert "add user root,eve account=a,b defaultaccount=a" in setup
