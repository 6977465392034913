"""Brings all ranks of one start together and compares them, before torch is imported.

Rank 0 listens on a free port and writes its addresses and a nonce to a file in the shared folder.
The others find the file, connect, prove that they know the nonce and say who they are. When all
are there and agree, rank 0 tells everybody what it has decided; when they cannot, it tells
everybody why, so that each rank ends with the same words.

Three ways to end: a Meeting, an error, or MeetingStoppedError when a rank was asked to stop.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_pt.errors import LaunchError
from slurm_pt.launch.environment import Launcher, RankInfo
from slurm_pt.launch.guest import Guest
from slurm_pt.launch.hello import Hello, make_hello
from slurm_pt.launch.host import Host
from slurm_pt.launch.meeting import Agree, Meeting, MeetingStoppedError, RankLostError, Terms
from slurm_pt.launch.network import choose_interface, list_interfaces

__all__ = [
    "Hello",
    "Meeting",
    "MeetingStoppedError",
    "RankLostError",
    "launch_key",
    "make_hello",
    "meet",
]

REPORT_S = 30.0
"""Seconds between two lines about who is missing."""

LAUNCH_KEY_VARIABLE = "SLURM_PT_LAUNCH_KEY"


def launch_key(info: RankInfo, environ: Mapping[str, str]) -> str:
    """A name for this start that all of its ranks know, fit for a file name.

    It need not be new: a file that an earlier start of the same key left is seen through.
    """
    job = ""
    if info.job_id is not None:
        job = f"job{info.job_id}-step{info.step_id or 'none'}-start{info.restart_count}"
    if info.launcher is Launcher.slurm:
        key = job
    elif info.launcher is Launcher.torchrun:
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        parts = [environ[name] for name in names if name in environ]
        key = "-".join(["torchrun", *parts, *([job] if job else [])])
    elif info.launcher is Launcher.single:
        key = "single"
    else:
        given = (LAUNCH_KEY_VARIABLE, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
        key = next((environ[name] for name in given if environ.get(name)), job)
    if not key:
        raise LaunchError(
            f"{info.launcher.value} gives no name for this start, by which its ranks find each "
            f"other. To fix: set {LAUNCH_KEY_VARIABLE} to one new word on all ranks."
        )
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", key)[:100]
    return plain if plain == key else f"{plain}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def meet(
    info: RankInfo,
    *,
    folder: Path,
    launch_key: str,
    hello: Hello,
    timeout_s: float,
    interface: str | None,
    log: Callable[[str], None],
    stop_requested: Callable[[], bool],
    agree: Agree | None = None,
    report_s: float = REPORT_S,
) -> Meeting:
    """Waits until all ranks are there, compares them, and shares rank 0's decisions.

    Args:
        info: This rank.
        folder: On a file system that all nodes share; made if it is not there.
        launch_key: See `launch_key`.
        hello: This rank's facts.
        timeout_s: How long ranks may wait for each other.
        interface: cluster.interface.
        log: Gets one line every report_s while somebody is missing, and one at the end.
        stop_requested: Looked at ten times a second.
        agree: What rank 0 decides once all are there; on other ranks not called.
        report_s: Seconds between two lines about who is missing.

    Raises:
        LaunchError: The ranks do not fit together; the same text on every rank.
        RankLostError: Ranks are missing at the deadline, or one died while waiting.
        MeetingStoppedError: This rank or another was asked to stop.
    """
    agree = agree or (lambda _: {})
    if info.world_size == 1:
        return _meet_alone(hello, interface, agree)
    if hello.problem is None:
        hello = dataclasses.replace(hello, problem=_problem_with(interface))
    terms = Terms(
        info=info,
        folder=folder,
        launch_key=launch_key,
        timeout_s=timeout_s,
        report_s=report_s,
        interface=interface,
        log=log,
        stop_requested=stop_requested,
    )
    folder.mkdir(parents=True, exist_ok=True)
    return Host(terms, hello).meet(agree) if info.rank == 0 else Guest(terms, hello).meet()


def _meet_alone(hello: Hello, interface: str | None, agree: Agree) -> Meeting:
    if hello.problem is not None:
        raise LaunchError(hello.problem)
    chosen = choose_interface(list_interfaces(), wanted=interface, several_machines=False)
    return Meeting(
        address=(*chosen.addresses, "127.0.0.1")[0],
        port=0,
        interface=chosen.name,
        several_machines=False,
        hellos=(hello,),
        hosts=(hello.host,),
        agreed=dict(agree((hello,))),
    )


def _problem_with(interface: str | None) -> str | None:
    """What is wrong with cluster.interface on this machine."""
    try:
        choose_interface(list_interfaces(), wanted=interface, several_machines=False)
    except LaunchError as error:
        return str(error)
    return None
