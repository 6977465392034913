"""Ending a run for good, wherever it is."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

from slurm_pt.owner import boot_id, pid_start_time, read_owner
from slurm_pt.run_dir import RunDir
from slurm_pt.submit.run_state import current_job, last_decision

if TYPE_CHECKING:
    from slurm_pt.submit.slurm import SlurmClient


def cancel_run(run: RunDir, client: SlurmClient) -> str:
    """Cancels a run's job or local processes; what was done, in words."""
    if run.done.exists():
        return "finished already"
    job = current_job(run)
    if job is None:
        return _cancel_by_hand(run)
    end = last_decision(run)
    if end is not None and end["action"] == "stop" and end["time"] > job["submitted"]:
        return f"has ended already: {end['reason']}"
    run.record_event("cancel_requested")
    if job.get("job_key"):
        client.cancel(job["job_key"])
        return f"cancelled job {job['job_key']}"
    pid = job["pid"]
    if job["host"] != os.uname().nodename:
        return f"its local launcher runs on {job['host']}: cancel it there"
    if pid_start_time(pid) != job["pid_start"]:
        return "its local launcher has ended already"
    os.kill(pid, signal.SIGTERM)
    return f"asked local launcher {pid} to stop"


def _cancel_by_hand(run: RunDir) -> str:
    """Ends a run that was started at a terminal: its rank 0 owns the folder."""
    owner = read_owner(run)
    if owner is None:
        return "was never submitted"
    if owner.released:
        return "is not running"
    if (owner.boot_id, owner.host) != (boot_id(), socket.gethostname()):
        return f"was started by hand on {owner.host}: end it there, process {owner.pid}"
    if pid_start_time(owner.pid) != owner.pid_start:
        return "is not running"
    run.record_event("cancel_requested")
    os.kill(owner.pid, signal.SIGTERM)
    return f"asked process {owner.pid} to stop"
