"""The only caller of Slurm's commands. No answer is an error of its own, never an empty answer."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_pt.errors import SlurmUnavailableError, SubmitError
from slurm_pt.submit.environment import clean_environment
from slurm_pt.submit.states import JobPhase, job_phase, parse_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Words by which Slurm's commands say that the controller or the database did not answer. Some
# releases print them and still exit with 0.
_NO_ANSWER = re.compile(
    r"timed out|connection (?:refused|reset)|unable to contact|communication|"
    r"controller.*(?:down|not respond)|configuration source|"
    r"unexpected message received|"  # all that scontrol requeue says of a controller that is away
    r"slurm_load_jobs error: (?!Invalid job id|Invalid user)",
    re.IGNORECASE,
)
_GONE = re.compile(r"Invalid job id|already completing or completed", re.IGNORECASE)
# Ids, states and times only: text that users type (names, folders) can hold any separator.
_JOB_FIELDS = "%i|%A|%T|%S|%e|%l|%D|%r"


@dataclass(frozen=True)
class JobView:
    """One job, or one task of an array, as squeue or sacct sees it."""

    job_key: str
    """`123`, or `123_4` for an array task: the id for requeue, cancel and update."""
    job_id: str
    """The raw id, different for each array task once it has started."""
    state: str
    reason: str = ""
    start: str = ""
    end: str = ""
    time_limit: str = ""
    nodes: str = ""

    @property
    def phase(self) -> JobPhase:
        return job_phase(self.state, self.reason)


@dataclass(frozen=True)
class StopView:
    """Why Slurm is ending a job, and until when it may go on (Unix seconds; None: unset)."""

    state: str
    end_time: float | None
    preempt_time: float | None
    reason: str = ""


class UnknownJobError(SubmitError):
    """The controller does not know the job: it never did, or has forgotten it."""


class SlurmClient:
    """Slurm's commands with a time limit, a clean environment and answers that are checked."""

    def __init__(self, environ: Mapping[str, str] | None = None, *, timeout_s: float = 60.0):
        self._environ = dict(clean_environment(os.environ if environ is None else environ))
        self._timeout_s = timeout_s

    def is_available(self) -> bool:
        """Whether there is a sbatch, and something that tells it where its cluster is."""
        path = self._environ.get("PATH")
        if shutil.which("sbatch", path=path) is None:
            return False
        if "SLURM_CONF" in self._environ:
            return True
        places = (
            "/etc/slurm/slurm.conf",
            "/etc/slurm-llnl/slurm.conf",
            "/run/slurm/conf/slurm.conf",
        )
        if any(Path(place).exists() for place in places):
            return True
        # A "configless" site finds its controller through DNS: only asking tells.
        try:
            return self._run(["scontrol", "ping"], timeout_s=10).returncode == 0
        except SubmitError:
            return False

    # ------------------------------------------------------------------------- questions

    def query_my_jobs(self) -> dict[str, JobView]:
        """All of the user's jobs that the controller knows, array tasks one by one. One RPC."""
        user = str(os.getuid())  # not $USER, which anything may have set
        output = self._ask(["squeue", "-h", "-r", "-t", "all", "-u", user, "-o", _JOB_FIELDS])
        return {view.job_key: view for view in parse_squeue(output)}

    def query_stop(self, job_key: str, *, timeout_s: float = 5.0) -> StopView | None:
        """When and why a job is about to end; None if the controller does not know it."""
        fields = "State:32,EndTime:32,PreemptTime:32,Reason:32"
        # Without `-t all` a job that has just ended is not listed.
        command = ["squeue", "-h", "-t", "all", "-j", job_key, "-O", fields]
        try:
            return parse_stop(self._ask(command, timeout_s=timeout_s))
        except UnknownJobError:
            return None

    def query_ended(self, job_keys: Iterable[str]) -> dict[str, JobView]:
        """What the accounting database says of jobs; empty where there is no accounting."""
        keys = list(job_keys)
        if not keys:
            return {}
        command = ["sacct", "-X", "-n", "-P", "-j", ",".join(keys), "-o", "JobID,JobIDRaw,State"]
        answer = self._run(command)
        if answer.returncode != 0:
            return {}  # "accounting storage is disabled" is a property of the site, not a fault
        return {view.job_key: view for view in parse_sacct(answer.stdout)}

    def job_is_running(self, job_key: str) -> bool | None:
        """Whether a job holds nodes now; None if Slurm gives no answer."""
        try:
            view = self.query_stop(job_key, timeout_s=20)
        except SubmitError:
            return None
        return view is not None and job_phase(view.state) is JobPhase.running

    # --------------------------------------------------------------------------- requests

    def submit(self, script: Path, *, arguments: Sequence[str] = ()) -> str:
        """Hands a batch script to Slurm; the job id. Raises SubmitError in Slurm's own words."""
        answer = self._run(["sbatch", "--parsable", *arguments, str(script)])
        if answer.returncode != 0:
            self._require_answer(answer)
            raise SubmitError(self._explain(answer.stderr))
        for line in reversed(answer.stdout.splitlines()):  # a site's banner may come first
            if match := re.fullmatch(r"(\d+)(;\S+)?", line.strip()):
                return match[1]
        raise SubmitError(f"sbatch answered without a job id: {answer.stdout + answer.stderr}")

    def submit_test(self, script: Path) -> str:
        """What Slurm would do with a batch script. Raises SubmitError where it would refuse it."""
        answer = self._run(["sbatch", "--test-only", str(script)])
        if answer.returncode != 0:
            self._require_answer(answer)
            raise SubmitError(self._explain(answer.stderr))
        return answer.stderr.strip()

    def requeue(self, job_key: str) -> None:
        """Puts a running job back into the queue. Only ever for one task of an array."""
        answer = self._run(["scontrol", "requeue", job_key])
        if answer.returncode != 0 and "pending" not in answer.stderr.lower():
            self._require_answer(answer)
            raise SubmitError(f"scontrol requeue {job_key} was refused: {answer.stderr.strip()}")

    def cancel(self, job_key: str) -> None:
        """Ends a job, waiting or running; does nothing to one that has ended."""
        answer = self._run(["scancel", job_key])
        if answer.returncode != 0 and not _GONE.search(answer.stderr):
            self._require_answer(answer)
            raise SubmitError(f"scancel {job_key} was refused: {answer.stderr.strip()}")

    def comment_command(self, job_key: str, text: str) -> list[str]:
        """The command that shows `text` in squeue's %k; for a caller that must not wait."""
        return ["scontrol", "update", f"jobid={job_key}", f"comment={text}"]

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a command and does not wait for its answer."""
        return subprocess.Popen(
            command,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    # ---------------------------------------------------------------------------- plumbing

    def _ask(self, command: Sequence[str], *, timeout_s: float | None = None) -> str:
        answer = self._run(command, timeout_s=timeout_s)
        self._require_answer(answer)
        if answer.returncode != 0 and _GONE.search(answer.stderr):
            raise UnknownJobError(f"{command[0]}: {answer.stderr.strip()}")
        if answer.returncode != 0:
            raise SubmitError(f"{command[0]} failed: {answer.stderr.strip()}")
        return answer.stdout

    def _run(
        self, command: Sequence[str], *, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return subprocess.run(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except FileNotFoundError:
            raise SubmitError(
                f"{command[0]} is not on PATH. Submit from a login node of the cluster, or start "
                "a cluster of your own with `slurm-pt devcluster up`"
            ) from None
        except subprocess.TimeoutExpired:
            raise SlurmUnavailableError(
                f"{command[0]} gave no answer in {limit_s:.0f} s; the state of the jobs is unknown"
            ) from None

    def _require_answer(self, answer: subprocess.CompletedProcess[str]) -> None:
        # Whatever the exit code and the output: half an answer is none.
        if _NO_ANSWER.search(answer.stderr):
            raise SlurmUnavailableError(f"no answer from Slurm: {answer.stderr.strip()}")

    def _explain(self, stderr: str) -> str:
        """Slurm's own words, the key of ours that they are about, and the choices there are."""
        text = re.sub(r"^sbatch: (error: )?", "", stderr, flags=re.MULTILINE).strip()
        for pattern, key, command in _REFUSALS:
            if re.search(pattern, stderr, re.IGNORECASE):
                choices = self._choices(command) if command else []
                known = f" There are: {', '.join(choices)}." if choices else ""
                return f"Slurm refused the job: {text}\nThis is about {key}.{known}"
        return f"Slurm refused the job: {text}"

    def _choices(self, command: Sequence[str]) -> list[str]:
        if command[0] == "sacctmgr":
            command = [*command, f"user={_user_name()}"]
        try:
            lines = self._run(command, timeout_s=10).stdout.splitlines()
        except SubmitError:
            return []
        words = {word for line in lines for word in line.split("|")[0].split(",")}
        return sorted(words - {"", "(null)"})


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


_SHOW_ASSOCIATIONS = ("sacctmgr", "-n", "-P", "show", "assoc")
_REFUSALS: tuple[tuple[str, str, tuple[str, ...] | None], ...] = (
    (r"invalid partition", "slurm.partition", ("sinfo", "-h", "-a", "-o", "%R")),
    (r"invalid qos", "slurm.qos", (*_SHOW_ASSOCIATIONS, "format=QOS")),
    (
        r"invalid account",
        "slurm.account (and slurm.partition)",
        (*_SHOW_ASSOCIATIONS, "format=Account"),
    ),
    (r"gres", "slurm.gres and slurm.gpus_per_node", ("sinfo", "-h", "-a", "-o", "%G")),
    (r"invalid node name", "slurm.nodelist and slurm.exclude", ("sinfo", "-h", "-a", "-o", "%N")),
    (r"memory|--mem", "slurm.mem, slurm.mem_per_cpu and slurm.mem_per_gpu", None),
    (r"time limit|--time", "slurm.time", None),
    (r"node count|more processors|node configuration", "slurm.nodes and slurm.cpus_per_task", None),
    (r"array", "the size of the sweep (MaxArraySize)", None),
    (r"constraint|feature", "slurm.constraint", ("sinfo", "-h", "-a", "-o", "%f")),
    (r"reservation", "slurm.reservation", None),
    (r"policy|limit|QOSMax|AssocMax", "a limit of your account or QoS", None),
)


def parse_squeue(output: str) -> list[JobView]:
    """The jobs in squeue's answer to `_JOB_FIELDS`; lines of another shape are left out."""
    views = []
    for line in output.splitlines():
        fields = line.split("|", 7)
        if len(fields) == 8 and re.fullmatch(r"\d+(_\d+)?([+]\d+)?", fields[0]):
            key, job_id, state, start, end, limit, nodes, reason = fields
            views.append(
                JobView(key, job_id, parse_state(state), reason.strip(), start, end, limit, nodes)
            )
    return views


def parse_sacct(output: str) -> list[JobView]:
    """The jobs in sacct's answer to `JobID,JobIDRaw,State`."""
    views = []
    for line in output.splitlines():
        fields = line.split("|")
        if len(fields) == 3 and re.fullmatch(r"\d+(_\d+)?", fields[0]):
            views.append(JobView(fields[0], fields[1], parse_state(fields[2])))
    return views


def parse_stop(output: str) -> StopView | None:
    """State, end and preemption time, and reason from squeue's fixed columns of 32."""
    lines = output.splitlines()
    if not lines:
        return None
    state, end, preempt, reason = (lines[0][at : at + 32].strip() for at in (0, 32, 64, 96))
    return StopView(parse_state(state), _unix_time(end), _unix_time(preempt), reason)


def _unix_time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()  # Slurm prints local time
    except ValueError:
        return None  # N/A, Unknown, NONE, (null)
