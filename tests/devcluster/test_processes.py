import os
import sys
from pathlib import Path

from slurm_pt.devcluster import wait_until
from slurm_pt.devcluster.processes import (
    Process,
    daemon_environment,
    end_processes,
    node_namespaces,
    read_processes,
    select_cluster,
    start_daemon,
)

FOLDER, CONF = Path("/c"), Path("/c/etc/slurm.conf")


def process(pid: int, parent: int = 1, **fields: str) -> Process:
    empty = dict.fromkeys(("program", "folder", "role", "slurm_conf", "node", "namespace"), "")
    return Process(pid=pid, parent=parent, **{**empty, **fields})


TABLE = [
    process(1, namespace="mnt:[1]"),
    process(2, program="slurmd-wlm", folder="/c", role="slurmd-n1", namespace="mnt:[5]"),
    process(3, program="slurmstepd", folder="/c", role="slurmd-n1", namespace="mnt:[5]"),
    process(4, parent=3, slurm_conf="/c/etc/slurm.conf", node="n1", namespace="mnt:[5]"),
    process(5, parent=4),  # env -i
    process(6, slurm_conf="/c/etc/slurm.conf", node="n1"),  # setsid, orphaned
    process(7, namespace="mnt:[5]"),  # env -i and orphaned
    process(8, program="slurmd", folder="/c", role="slurmd-n2", namespace="mnt:[8]"),
    process(9, slurm_conf="/c/etc/slurm.conf"),  # the user's shell
    process(10, program="slurmd", folder="/other", role="slurmd-n1", namespace="mnt:[6]"),
    process(11, slurm_conf="/other/etc/slurm.conf", node="n1"),
    process(12, program="slurmd"),  # the site's
]


def pids(**options) -> list[int]:
    chosen = select_cluster(TABLE, folder=FOLDER, slurm_conf=CONF, **options)
    return sorted(process.pid for process in chosen)


def test_daemons_steps_and_jobs_are_ours_and_shells_and_other_clusters_are_not():
    assert pids() == [2, 3, 4, 5, 6, 8]


def test_a_nodes_namespace_tells_processes_that_nothing_else_tells():
    namespaces = node_namespaces(TABLE, folder=FOLDER)
    assert 7 in pids(namespaces=namespaces)
    assert 10 not in pids(namespaces=namespaces)


def test_the_machines_own_namespace_is_never_taken_for_a_nodes():
    strayed = process(13, program="slurmd", folder="/c", role="slurmd-n3", namespace="mnt:[1]")
    munged = process(14, program="munged", folder="/c", role="munged", namespace="mnt:[1]")
    assert "mnt:[1]" not in node_namespaces([*TABLE, strayed, munged], folder=FOLDER)
    this_test = process(os.getpid(), namespace="mnt:[1]")
    assert "mnt:[1]" not in node_namespaces([*TABLE, strayed, this_test], folder=FOLDER)


def test_one_node_can_be_selected():
    assert pids(node="n2") == [8]
    assert pids(node="n1") == [2, 3, 4, 5, 6]


def test_a_daemon_is_no_child_of_ours_and_hears_an_interrupt(tmp_path):
    code = "import signal; print(signal.getsignal(signal.SIGINT)); signal.pause()"
    output = tmp_path / "out"
    pid = start_daemon(
        [sys.executable, "-u", "-c", code],
        environment=daemon_environment(tmp_path, "tester", {"SLURM_CONF": "x"}),
        output=output,
        cwd=tmp_path,
    )

    def ours() -> list[Process]:
        return select_cluster(read_processes(tmp_path), folder=tmp_path, slurm_conf=tmp_path / "no")

    assert wait_until(lambda: output.exists() and output.read_text() != "", timeout_s=10)
    try:
        assert "default_int_handler" in output.read_text()
        (found,) = ours()
        assert (found.pid, found.role) == (pid, "tester")
        assert found.parent != os.getpid()
        assert os.getsid(pid) != os.getsid(0)
    finally:
        end_processes(ours)
    assert ours() == []


def test_the_callers_slurm_variables_do_not_reach_a_daemon(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "SLURM_JOB_ID" not in daemon_environment(FOLDER, "slurmd-n1", {})
