"""Ending a run for good, wherever it is."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from slurm_pt.owner import pid_start_time
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
        return "was never submitted"
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
