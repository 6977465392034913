import pytest
from click.testing import CliRunner

from slurm_pt.devcluster.cluster import ClusterStatus, NodeStatus, parse_nodes
from slurm_pt.devcluster.commands import devcluster, render_status
from slurm_pt.errors import DevClusterError


def test_env_of_no_cluster_prints_nothing_that_a_shell_would_evaluate(tmp_path):
    result = CliRunner().invoke(devcluster, ["env", "--folder", str(tmp_path / "dc")])
    assert isinstance(result.exception, DevClusterError)
    assert result.stdout == ""


def test_down_of_no_cluster_is_no_error(tmp_path):
    result = CliRunner().invoke(devcluster, ["down", "--folder", str(tmp_path / "dc")])
    assert result.exit_code == 0
    assert "There is no cluster" in result.stdout


@pytest.mark.parametrize("command", ["up", "down", "status", "env", "install"])
def test_every_command_explains_itself(command):
    assert CliRunner().invoke(devcluster, [command, "--help"]).exit_code == 0


def test_a_status_names_what_has_ended_and_why_a_node_is_down(tmp_path):
    status = ClusterStatus(
        folder=tmp_path,
        slurm_version="22.05.8",
        daemons={"slurmctld": 7, "slurmd-n1": None},
        nodes=(NodeStatus("n1", "down*", "Not responding"),),
    )
    assert not status.is_whole
    assert "slurmd-n1    ended" in render_status(status)
    assert "n1           down* Not responding" in render_status(status)


def test_nodes_are_read_with_reasons_that_contain_spaces():
    text = (
        "NodeName=n1 Arch=x86_64 State=IDLE ThreadsPerCore=1 TmpDisk=0\n"
        "NodeName=n2 State=DOWN* Partitions=main"
        " Reason=Not responding [slurm@2026-11-30T14:00:00]\n"
    )
    assert parse_nodes(text) == (
        NodeStatus("n1", "idle", ""),
        NodeStatus("n2", "down*", "Not responding [slurm@2026-11-30T14:00:00]"),
    )
