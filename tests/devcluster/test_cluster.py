"""The real thing: every test here starts daemons, and none waits without a deadline."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from slurm_pt.devcluster import DevCluster, DevClusterConfig, wait_until
from slurm_pt.devcluster.processes import read_processes
from slurm_pt.errors import DevClusterError

pytestmark = pytest.mark.slurm

# A job that notes each start, and that nothing but KILL ends.
STUBBORN = """#!/bin/bash
trap '' TERM
echo "start ${SLURM_RESTART_COUNT:-0}" >> starts
for i in $(seq 600); do sleep 1; done
"""


def traces_of(cluster: DevCluster) -> list[int]:
    """The pids of all processes that have to do with the cluster, jobs' processes included."""
    return [
        process.pid
        for process in read_processes(cluster.folder)
        if process.folder == str(cluster.folder) or process.slurm_conf == str(cluster.slurm_conf)
    ]


def submit(cluster: DevCluster, folder: Path, script: str, *options: str) -> str:
    path = folder / f"job-{time.monotonic_ns()}.sh"
    path.write_text(script)
    return cluster.run(["sbatch", "--parsable", *options, str(path)], cwd=folder).stdout.strip()


def job_state(cluster: DevCluster, job: str) -> str:
    return cluster.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]).stdout.strip()


def reaches(cluster: DevCluster, job: str, state: str, timeout_s: float = 30) -> bool:
    return wait_until(lambda: job_state(cluster, job) == state, timeout_s=timeout_s, poll_s=0.2)


def test_a_cluster_comes_up_quickly_and_goes_without_a_trace(start_devcluster, tmp_path):
    begin = time.monotonic()
    cluster = start_devcluster(DevClusterConfig())
    took = time.monotonic() - begin
    print(f"up: {took:.1f} s")
    assert took < 60  # 5 s on an idle machine of two cores; this one may be busy
    status = cluster.status()
    assert status.is_whole
    assert [node.state for node in status.nodes] == ["idle"] * 4
    # The sleepers leave their session, their parents and (the second) their environment.
    submit(
        cluster,
        tmp_path,
        "#!/bin/bash\nsetsid sleep 300 & (env -i setsid sleep 301 &)\n"
        "echo $(pgrep -f 'sleep 30[01]') > pids; srun sleep 302\n",
    )
    assert wait_until(lambda: (tmp_path / "pids").exists(), timeout_s=20)
    assert wait_until(lambda: len(job_processes(cluster)) >= 3, timeout_s=20)
    assert wait_until(lambda: len(step_keepers(cluster)) >= 2, timeout_s=20)
    before = {*traces_of(cluster), *step_keepers(cluster)}
    assert set(status.daemons.values()) <= before
    starts = {pid: start_of(pid) for pid in before}
    assert cluster.down()
    assert traces_of(cluster) == []
    # Asked without what marks them: a step's keeper loses its socket with the folder.
    assert [pid for pid, start in starts.items() if start and start_of(pid) == start] == []
    assert not cluster.folder.exists()
    assert not cluster.exists


def start_of(pid: int) -> str:
    """When the process started, since pids come again; empty if it has ended.

    A zombie has ended: only its parent can remove it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def step_keepers(cluster: DevCluster) -> list[int]:
    ours = [p for p in read_processes(cluster.folder) if p.folder == str(cluster.folder)]
    return [p.pid for p in ours if "stepd" in p.program]


def job_processes(cluster: DevCluster) -> list[int]:
    return [
        p.pid
        for p in read_processes(cluster.folder)
        if p.node and p.slurm_conf == str(cluster.slurm_conf)
    ]


def test_a_process_that_hid_from_slurm_ends_with_the_cluster(start_devcluster, tmp_path):
    cluster = start_devcluster(DevClusterConfig(nodes=1, accounting=False))
    if not cluster.status().nodes or cluster.run(["srun", "hostname"]).stdout != "n1\n":
        pytest.skip("this machine lets nodes have no namespaces, by which alone it is found")
    # No parent, no session, no environment, and its job is over.
    submit(cluster, tmp_path, '#!/bin/bash\n(env -i setsid sh -c "echo \\$\\$ >pid; sleep 99" &)\n')
    pid = tmp_path / "pid"
    assert wait_until(lambda: pid.exists() and pid.read_text() != "", timeout_s=20)
    hidden = int(pid.read_text())
    assert hidden in [process.pid for process in read_processes(cluster.folder)]
    cluster.down()
    assert hidden not in [
        p.pid for p in read_processes(cluster.folder) if p.namespace.startswith("mnt")
    ]


def test_a_job_runs_on_four_nodes_each_with_its_own_name_and_gpus(devcluster):
    script = 'echo "$SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES"'
    ran = devcluster.run(["srun", "-N4", "--gpus-per-node=2", "sh", "-c", script])
    assert sorted(ran.stdout.splitlines()) == ["n1 0 0,1", "n2 1 0,1", "n3 2 0,1", "n4 3 0,1"]


def test_two_jobs_on_a_node_see_different_gpus(devcluster, tmp_path):
    job = submit(
        devcluster,
        tmp_path,
        "#!/bin/bash\necho $CUDA_VISIBLE_DEVICES > first\nsleep 60\n",
        "-wn1",
        "--gres=gpu:a100:3",
    )
    try:
        assert wait_until(lambda: (tmp_path / "first").exists(), timeout_s=20)
        ran = devcluster.run(
            ["srun", "-wn1", "--gres=gpu:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
        )
        assert (tmp_path / "first").read_text() == "0,1,2\n"
        assert ran.stdout == "3,4\n"
    finally:
        devcluster.run(["scancel", job])


def test_nodes_have_host_names_that_every_node_resolves(devcluster):
    script = "hostname; getent hosts n3"
    ran = devcluster.run(["srun", "-wn1,n2", "sh", "-c", script], check=False)
    names = [line for line in ran.stdout.splitlines() if "127" not in line]
    if not {"n1", "n2"} & set(names):
        pytest.skip("this machine lets nodes have no host names of their own")
    assert sorted(names) == ["n1", "n2"]
    assert len(re.findall(r"127\.0\.1\.3\s+n3", ran.stdout)) == 2


def test_accounting_knows_users_accounts_and_qos(devcluster):
    rows = devcluster.run(
        ["sacctmgr", "-nP", "show", "assoc", "user=root", "format=account,user,qos,defaultqos"]
    ).stdout.splitlines()
    (demo,) = [row for row in rows if row.startswith("demo|root|")]
    assert sorted(demo.split("|")[2].split(",")) == ["high", "low", "normal"]
    ran = devcluster.run(["srun", "sh", "-c", "echo $SLURM_JOB_ACCOUNT $SLURM_JOB_QOS"])
    assert ran.stdout == "demo normal\n"
    job = devcluster.run(["srun", "sh", "-c", "echo $SLURM_JOB_ID"]).stdout.strip()
    ask = ["sacct", "-nXP", "-j", job, "-o", "state"]
    assert wait_until(lambda: devcluster.run(ask).stdout == "COMPLETED\n", timeout_s=20)
    refused = devcluster.run(["srun", "-Anobody", "true"], check=False)
    assert "Invalid account" in refused.stderr


def test_a_qos_limit_can_be_set_from_a_test(devcluster):
    devcluster.run(["sacctmgr", "-i", "modify", "qos", "low", "set", "MaxTRESPU=node=1"])
    try:
        refused = devcluster.run(["srun", "-qlow", "-N2", "-I5", "true"], check=False)
        assert refused.returncode != 0
    finally:
        devcluster.run(["sacctmgr", "-i", "modify", "qos", "low", "set", "MaxTRESPU=node=-1"])
    assert devcluster.run(["srun", "-qlow", "-N2", "true"]).returncode == 0


def test_an_account_can_be_added_to_a_running_cluster(devcluster):
    devcluster.add_account("second")
    ran = devcluster.run(["srun", "-Asecond", "-qhigh", "sh", "-c", "echo $SLURM_JOB_ACCOUNT"])
    assert ran.stdout == "second\n"


@pytest.mark.parametrize("preempt_type", ["qos", "partition"])
def test_high_preempts_low_which_is_requeued_and_runs_again(
    start_devcluster, tmp_path, preempt_type
):
    cluster = start_devcluster(DevClusterConfig(nodes=2, preempt_type=preempt_type, grace_time_s=1))
    flag = "--qos" if preempt_type == "qos" else "--partition"
    low = submit(cluster, tmp_path, STUBBORN, "-N2", "--exclusive", f"{flag}=low")
    assert reaches(cluster, low, "RUNNING")
    assert wait_until(lambda: (tmp_path / "starts").exists(), timeout_s=20)
    high = submit(cluster, tmp_path, "#!/bin/sh\nsleep 1\n", "-N2", "--exclusive", f"{flag}=high")
    begin = time.monotonic()
    # The controller looks only every 30 s whether a grace has ended.
    assert reaches(cluster, high, "COMPLETED", timeout_s=75)
    print(f"high is done after {time.monotonic() - begin:.1f} s")
    assert reaches(cluster, low, "RUNNING", timeout_s=60)
    print(f"low runs again after {time.monotonic() - begin:.1f} s")
    assert wait_until(
        lambda: (tmp_path / "starts").read_text() == "start 0\nstart 1\n", timeout_s=20
    )


def test_with_preempt_mode_cancel_the_job_does_not_come_back(start_devcluster, tmp_path):
    cluster = start_devcluster(
        DevClusterConfig(nodes=1, preempt_mode="cancel", grace_time_s=0, kill_wait_s=5)
    )
    low = submit(cluster, tmp_path, STUBBORN, "--exclusive", "--qos=low")
    assert reaches(cluster, low, "RUNNING")
    submit(cluster, tmp_path, "#!/bin/sh\ntrue\n", "--exclusive", "--qos=high")
    assert reaches(cluster, low, "PREEMPTED", timeout_s=40)


def test_the_user_signal_is_sent_at_a_preemption_where_the_site_says_so(start_devcluster, tmp_path):
    cluster = start_devcluster(DevClusterConfig(nodes=1, send_user_signal=True, grace_time_s=5))
    script = (
        '#!/bin/bash\nsrun bash -c \'trap "echo USR2 >>signals" USR2;'
        ' trap "echo TERM >>signals" TERM; touch ready; while :; do sleep 0.1; done\'\n'
    )
    low = submit(
        cluster, tmp_path, script, "--exclusive", "--qos=low", "--signal=USR2@60", "--time=60"
    )
    assert wait_until(lambda: (tmp_path / "ready").exists(), timeout_s=20)
    high = submit(cluster, tmp_path, "#!/bin/sh\ntrue\n", "--exclusive", "--qos=high")
    assert wait_until(lambda: (tmp_path / "signals").exists(), timeout_s=20)
    assert (tmp_path / "signals").read_text().splitlines()[0] == "USR2"
    cluster.run(["scancel", low, high])


def test_two_clusters_run_side_by_side_and_one_goes_without_the_other(start_devcluster):
    config = DevClusterConfig(nodes=2, accounting=False)
    first, second = start_devcluster(config), start_devcluster(config)
    for cluster in (first, second):
        assert cluster.run(["srun", "-N2", "sh", "-c", "echo ok"]).stdout == "ok\nok\n"
    first.down()
    assert second.status().is_whole
    assert second.run(["srun", "-N2", "sh", "-c", "echo ok"]).stdout == "ok\nok\n"


def test_a_bad_line_in_slurm_conf_fails_with_the_line_that_explains_it(slurm_packages, tmp_path):
    cluster = DevCluster(tmp_path / "dc")
    with pytest.raises(DevClusterError) as caught:
        cluster.up(DevClusterConfig(accounting=False, extra_slurm_conf=["SchedulerTipe=backfil"]))
    assert "SchedulerTipe" in str(caught.value)
    assert not cluster.folder.exists()
    assert traces_of(cluster) == []


def test_a_cluster_whose_nodes_never_come_is_cleaned_up_with_the_reason(slurm_packages, tmp_path):
    cluster = DevCluster(tmp_path / "dc")
    with pytest.raises(DevClusterError) as caught:
        cluster.up(
            DevClusterConfig(
                nodes=1, accounting=False, extra_slurm_conf=["SelectType=select/nonsense"]
            )
        )
    assert "select/nonsense" in str(caught.value)
    assert traces_of(cluster) == []


def test_a_second_cluster_in_the_same_folder_is_refused_and_the_first_lives(start_devcluster):
    cluster = start_devcluster(DevClusterConfig(nodes=1, accounting=False))
    with pytest.raises(DevClusterError, match="already"):
        DevCluster(cluster.folder).up(DevClusterConfig(nodes=1, accounting=False))
    assert cluster.status().is_whole


def test_a_killed_controller_comes_back_with_its_jobs(start_devcluster, tmp_path):
    cluster = start_devcluster(DevClusterConfig(nodes=1, accounting=False))
    job = submit(cluster, tmp_path, STUBBORN)
    assert reaches(cluster, job, "RUNNING")
    cluster.stop_controller()
    assert "DOWN" in cluster.run(["scontrol", "ping"], check=False).stdout
    status = cluster.status()
    assert status.daemons["slurmctld"] is None
    assert not status.is_whole
    cluster.start_controller()
    assert reaches(cluster, job, "RUNNING")


def test_a_killed_node_takes_its_job_along_and_comes_back(start_devcluster, tmp_path):
    cluster = start_devcluster(DevClusterConfig(nodes=2, accounting=False))
    job = submit(cluster, tmp_path, STUBBORN, "-wn2")
    assert reaches(cluster, job, "RUNNING")
    assert wait_until(lambda: len(job_processes(cluster)) > 0, timeout_s=20)
    cluster.kill_node("n2", noticed=True)
    assert job_processes(cluster) == []
    assert cluster.status().daemons["slurmd-n2"] is None
    assert cluster.run(["srun", "-wn1", "sh", "-c", "echo ok"]).stdout == "ok\n"
    cluster.start_node("n2")
    assert wait_until(
        lambda: (tmp_path / "starts").read_text() == "start 0\nstart 1\n", timeout_s=60
    )


def test_down_works_after_daemons_died_and_a_dead_cluster_is_replaced(start_devcluster):
    cluster = start_devcluster(DevClusterConfig(nodes=1, accounting=False))
    cluster.stop_controller(kill=True)
    cluster.kill_node("n1")
    cluster.down()
    assert traces_of(cluster) == []
    cluster.up(DevClusterConfig(nodes=1, accounting=False))
    assert cluster.status().is_whole
