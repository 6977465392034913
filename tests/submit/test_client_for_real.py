"""SlurmClient against a real Slurm."""

from __future__ import annotations

import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from slurm_pt.devcluster import DevClusterConfig, wait_until
from slurm_pt.errors import SlurmUnavailableError, SubmitError
from slurm_pt.files import read_json, write_json
from slurm_pt.launch.preemption import StopCause, stop_cause
from slurm_pt.plan import make_plan
from slurm_pt.submit.run_state import RunPhase, run_state
from slurm_pt.submit.script import make_job_spec, render_script
from slurm_pt.submit.slurm import SlurmClient
from slurm_pt.submit.states import JobPhase
from slurm_pt.submit.sweep import submit_points
from tests.builders import make_point, make_run, read_small
from tests.submit.conftest import Bench, make_bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("over_its_limit")]

SLEEP = "#!/bin/bash\nsleep 600\n"
NASTY_NAMES = [
    "my run",
    "a/b",
    "(x)",
    "it's",
    'say "hi"',
    "$HOME",
    "${PATH}",
    "`id`",
    "$(id)",
    "名前",
    "-p high",
    "--qos=high",
    "a\\b",
    "\\",
    "a\\'b",
    "#x",
    "a # b",
    "x;y",
    "a&&b",
    "a|b",
    "*",
    "~",
    "!x",
    "%j",
    "  both ends  ",
    "n" * 200,
]


def held_job_with(bench: Bench, **slurm: object) -> str:
    config = read_small(**{f"slurm__{key}": value for key, value in slurm.items()})
    folder = bench.folder
    spec = make_job_spec(config, make_plan(config))
    text = render_script(spec, (folder,), log=folder / "slurm-%j.out", manifest=folder / "runs.txt")
    path = folder / "job.sbatch"
    path.write_text(text)
    return bench.note(bench.client.submit(path, arguments=["--hold"]))


# ---------------------------------------------------------------------------- what is submitted


@pytest.mark.parametrize("name", NASTY_NAMES)
def test_a_value_of_the_script_arrives_as_one_word_f101(bench, name):
    job = held_job_with(bench, job_name=name, additional_parameters={"comment": name})
    assert bench.ask(job, "%j") == name
    assert bench.ask(job, "%k") == name
    assert bench.ask(job, "%P %q") == "main normal"  # no part of it became an option


def test_logs_go_into_a_folder_that_was_made_before_whatever_its_name_f100(bench):
    root = bench.folder / '50%j of $HOME it\'s "new"'
    point = make_point(root, slurm__python="/bin/true", slurm__mem="50")
    submitted = submit_points([point], client=bench.client, jobs=bench.client.query_my_jobs())
    job = bench.note(read_json(point.run.job)["job_key"])
    assert submitted.folder is not None
    log = submitted.folder / f"slurm-{job}.out"
    assert wait_until(log.exists, timeout_s=60)
    bench.wait_for(job, "COMPLETED")
    # /bin/true begins no attempt and writes no done.json: Slurm's COMPLETED is no success (F75).
    jobs = bench.client.query_my_jobs()
    assert run_state(point.run, jobs).phase is RunPhase.unknown  # within the settling time
    write_json(point.run.job, {**read_json(point.run.job), "submitted": 0.0})
    found = run_state(point.run, jobs)
    assert found.phase is RunPhase.failed
    assert found.reason == "Slurm says COMPLETED, but the run left no done.json"


def test_a_sweep_becomes_an_array_whose_tasks_have_states_of_their_own(bench):
    points = [
        make_point(bench.folder / "r", train__seed=seed, slurm__mem="50", slurm__python="/bin/true")
        for seed in range(3)
    ]
    submit_points(points, client=bench.client, jobs={})
    keys = [read_json(point.run.job)["job_key"] for point in points]
    bench.note(keys[0].split("_")[0])
    assert [key.split("_")[1] for key in keys] == ["0", "1", "2"]
    known = bench.client.query_my_jobs()
    assert set(keys) <= known.keys()
    assert wait_until(
        lambda: {bench.client.query_my_jobs()[key].state for key in keys} == {"COMPLETED"},
        timeout_s=60,
        poll_s=0.3,
    )


def test_an_outer_jobs_variables_do_not_reach_the_inner_job_f12(bench):
    inner = bench.folder / "inner.sbatch"
    inner.write_text(
        f"#!/bin/bash\n#SBATCH --mem=100\n#SBATCH --output={bench.folder}/inner.out\n"
        "srun echo mem=$SLURM_MEM_PER_NODE cpu=$SLURM_MEM_PER_CPU mine=$MINE\n"
    )
    code = (
        "from pathlib import Path; from slurm_pt.submit.slurm import SlurmClient; "
        f"print(SlurmClient().submit(Path({str(inner)!r})))"
    )
    outer = (
        "#!/bin/bash\n#SBATCH --mem-per-cpu=50\n"
        f"export MINE=yes\n{shlex.quote(sys.executable)} -c {shlex.quote(code)}\n"
    )
    path = bench.folder / "outer.sbatch"
    path.write_text(outer)
    command = ["sbatch", "--parsable", f"--output={bench.folder}/outer.out", str(path)]
    bench.note(bench.cluster.run(command).stdout.strip())
    out = bench.folder / "outer.out"
    assert wait_until(lambda: out.exists() and out.read_text().strip() != "", timeout_s=90)
    job = bench.note(out.read_text().strip())
    assert job.isdecimal(), job
    bench.wait_for(job, "COMPLETED", "FAILED")
    assert (bench.folder / "inner.out").read_text() == "mem=100 cpu= mine=yes\n"


@pytest.mark.parametrize(
    ("option", "slurms_words", "key", "choices"),
    [
        ("--partition=nope", "Invalid partition name specified", "slurm.partition", "debug, main"),
        ("--qos=nope", "Invalid qos specification", "slurm.qos", "high, low, normal"),
        ("--account=nope", "Invalid account or account/partition", "slurm.account", "demo"),
        ("--gres=tpu:1", "Invalid generic resource", "slurm.gres", "gpu:a100:8"),
        ("--nodelist=zz", "Invalid node name", "slurm.nodelist", "n[1-4]"),
        ("--mem=900G", "Memory specification can not be satisfied", "slurm.mem", ""),
        ("--mem=1.5G", "Invalid --mem specification", "slurm.mem", ""),
        ("--time=1d", "Invalid --time specification", "slurm.time", ""),
        ("--array=0-5000", "Invalid job array specification", "MaxArraySize", ""),
        ("--constraint=nope", "Invalid feature specification", "slurm.constraint", ""),
        ("--reservation=nope", "Requested reservation is invalid", "slurm.reservation", ""),
        ("--dependency=nonsense", "ependency", "", ""),
    ],
)
def test_a_refusal_has_slurms_words_our_key_and_the_choices_f97(
    bench, option, slurms_words, key, choices
):
    path = bench.folder / "job.sbatch"
    path.write_text(f"#!/bin/bash\n#SBATCH {option}\ntrue\n")
    with pytest.raises(SubmitError) as caught:
        bench.client.submit(path)
    message = str(caught.value)
    assert not isinstance(caught.value, SlurmUnavailableError)
    assert slurms_words in message
    assert key in message
    assert choices in message
    assert "(null)" not in message
    with pytest.raises(SubmitError):
        bench.client.submit_test(path)


def test_a_script_can_be_tested_without_submitting_it(bench):
    before = bench.client.query_my_jobs().keys()
    path = bench.folder / "job.sbatch"
    path.write_text(SLEEP)
    assert "to start at" in bench.client.submit_test(path)
    assert bench.client.query_my_jobs().keys() == before


# ---------------------------------------------------------------------------- what is asked


def test_names_of_other_jobs_do_not_break_the_answer_f86(bench):
    names = [
        "a b",
        "odd|name",
        "ünïcødé-名前",
        "x=1,y=[1,2]",
        "two\nlines",
        "%j",
        "n" * 200,
        "|" * 9,
    ]
    jobs = {bench.submit(SLEEP, "--hold", f"--job-name={name}") for name in names}
    known = bench.client.query_my_jobs()
    assert jobs <= known.keys()
    assert {known[job].phase for job in jobs} == {JobPhase.held}
    assert all(key.replace("_", "").isdecimal() for key in known)


def test_habits_in_the_users_environment_do_no_harm(bench):
    habits = {
        "SQUEUE_FORMAT": "%j",
        "SQUEUE_FORMAT2": "name",
        "SQUEUE_STATES": "SUSPENDED",
        "SQUEUE_USERS": "nobody",
        "SQUEUE_SORT": "j",
        "SLURM_TIME_FORMAT": "relative",
        "SBATCH_PARTITION": "debug",
        "SBATCH_QOS": "nope",
        "SACCT_FORMAT": "jobname",
        "USER": "nobody",
        "LOGNAME": "nobody",
    }
    client = SlurmClient({**bench.cluster.environment(), **habits})
    path = bench.folder / "job.sbatch"
    path.write_text(
        "#!/bin/bash\n#SBATCH --mem=50\n#SBATCH --time=10\n#SBATCH --output=/dev/null\nsleep 600\n"
    )
    job = bench.note(client.submit(path))
    assert bench.ask(job, "%P %q") == "main normal"
    bench.wait_for(job, "RUNNING")
    assert client.query_my_jobs()[job].state == "RUNNING"
    view = client.query_stop(job)
    assert view is not None
    assert view.end_time is not None
    assert 500 < view.end_time - time.time() <= 600


def test_a_job_is_running_or_not_or_nobody_knows(bench):
    held = bench.submit(SLEEP, "--hold")
    running = bench.submit(SLEEP)
    bench.wait_for(running, "RUNNING")
    assert bench.client.job_is_running(running) is True
    assert bench.client.job_is_running(held) is False
    assert bench.client.job_is_running("4000000") is False
    assert bench.client.query_stop("4000000") is None
    assert SlurmClient({"PATH": ""}).job_is_running(running) is None


def test_progress_in_the_comment_is_shown_by_plain_squeue(bench):
    job = bench.submit(SLEEP)
    bench.wait_for(job, "RUNNING")
    text = "step 1200/5000 loss 2.305 it's 50%"
    assert bench.client.start(bench.client.comment_command(job, text)).wait(timeout=60) == 0
    assert bench.ask(job, "%k") == text


def test_a_missing_command_says_where_to_go():
    with pytest.raises(SubmitError, match=r"squeue is not on PATH.*slurm-pt devcluster up"):
        SlurmClient({"PATH": "/nowhere"}).query_my_jobs()
    assert not SlurmClient({"PATH": "/nowhere"}).is_available()


# ------------------------------------------------------------------- why a job is being stopped


def cause_of(bench: Bench, job: str, *, signal_lead_s: float = 10) -> StopCause:
    view = bench.client.query_stop(job)
    return stop_cause(view, now=time.time(), signal_lead_s=signal_lead_s)


@pytest.fixture(scope="module")
def over_its_limit(devcluster, tmp_path_factory) -> Iterator[tuple[Bench, str]]:
    """A job whose time is up now: Slurm looks every 30 s, while the other tests run."""
    bench = make_bench(devcluster, tmp_path_factory.mktemp("limit"))
    job = bench.start_stubborn("--time=10", "--signal=USR2@1")
    devcluster.run(["scontrol", "update", f"jobid={job}", "EndTime=now"])
    yield bench, job
    bench.cancel_all()


def test_a_cancelled_job_is_seen_as_cancelled_and_can_be_cancelled_twice_f39(bench):
    job = bench.start_stubborn("--time=30")
    assert cause_of(bench, job) is StopCause.unknown
    bench.client.cancel(job)
    assert cause_of(bench, job) is StopCause.cancelled
    bench.client.cancel(job)
    bench.wait_for(job, "CANCELLED")
    bench.client.cancel(job)
    bench.client.cancel("4000000")
    assert cause_of(bench, job) is StopCause.cancelled
    run = make_run(bench.folder)
    write_json(run.job, {"job_key": job, "submitted": time.time(), "folder": "/"})
    assert run_state(run, bench.client.query_my_jobs()).phase is RunPhase.cancelled
    assert wait_until(
        lambda: {v.state for v in bench.client.query_ended([job]).values()} == {"CANCELLED"},
        timeout_s=60,
        poll_s=0.5,
    )


def test_a_preempted_job_is_seen_as_preempted_with_its_deadline_f28(bench):
    node = ("--nodelist=n4", "--exclusive")
    low = bench.start_stubborn(*node, "--qos=low", "--time=2")
    bench.submit("#!/bin/bash\ntrue\n", *node, "--qos=high")
    assert wait_until(lambda: cause_of(bench, low) is StopCause.preempted, timeout_s=60)
    view = bench.client.query_stop(low)
    assert view is not None
    assert view.end_time is not None
    assert view.preempt_time is not None
    assert view.end_time - view.preempt_time == 15  # GraceTime


def test_a_job_that_a_person_requeues_is_not_seen_as_cancelled(bench):
    for limit in ("--time=30", "--time=UNLIMITED"):
        job = bench.start_stubborn(limit)
        bench.client.requeue(job)
        assert cause_of(bench, job) is StopCause.unknown
        bench.client.requeue(job)  # asked again while it is on its way: no error
        bench.client.cancel(job)


def test_a_requeue_of_one_task_leaves_its_siblings_alone(bench):
    job = bench.submit(SLEEP, "--array=0-2")
    keys = [f"{job}_{task}" for task in range(3)]
    bench.wait_for(keys[2], "RUNNING")
    assert wait_until(
        lambda: {bench.client.query_my_jobs()[key].state for key in keys} == {"RUNNING"},
        timeout_s=60,
        poll_s=0.2,
    )
    starts = {key: view.start for key, view in bench.client.query_my_jobs().items()}
    bench.client.requeue(keys[1])
    bench.wait_for(keys[1], "PENDING")
    after = bench.client.query_my_jobs()
    assert [after[key].state for key in keys] == ["RUNNING", "PENDING", "RUNNING"]
    assert [after[key].start for key in (keys[0], keys[2])] == [starts[keys[0]], starts[keys[2]]]


def test_a_refused_requeue_has_slurms_words_f32(bench):
    job = bench.submit(SLEEP, "--no-requeue")
    bench.wait_for(job, "RUNNING")
    with pytest.raises(SubmitError, match="Requested operation is presently disabled"):
        bench.client.requeue(job)
    with pytest.raises(SubmitError, match="Invalid job id"):
        bench.client.requeue("4000000")


def test_a_job_over_its_limit_is_seen_as_timed_out_also_while_it_is_killed_f28(over_its_limit):
    bench, job = over_its_limit
    assert cause_of(bench, job) is StopCause.timed_out  # warned, or over it already
    bench.wait_for(job, "COMPLETING", "TIMEOUT", timeout_s=150)
    assert cause_of(bench, job) is StopCause.timed_out


# ------------------------------------------------------------------------ when nobody answers


def test_without_accounting_and_without_controller_nothing_is_concluded_f77_f80(
    start_devcluster, tmp_path
):
    # Slurm's commands go on trying for several times the message time-out, 10 s by default.
    cluster = start_devcluster(
        DevClusterConfig(nodes=1, accounting=False, extra_slurm_conf=["MessageTimeout=2"])
    )
    bench = make_bench(cluster, tmp_path)
    client = bench.client
    ended = bench.submit("#!/bin/bash\nexit 3\n")
    running = bench.submit(SLEEP)
    bench.wait_for(running, "RUNNING")
    assert client.query_ended([running, ended]) == {}  # sacct: accounting storage is disabled
    run = make_run(tmp_path)
    write_json(run.job, {"job_key": running, "submitted": 0.0, "folder": "/"})
    assert run_state(run, client.query_my_jobs()).phase is RunPhase.running

    cluster.stop_controller()
    path = tmp_path / "more.sbatch"
    path.write_text(SLEEP)
    questions: list[Callable[[], object]] = [
        client.query_my_jobs,
        lambda: client.query_stop(running, timeout_s=60),
        lambda: client.submit(path),
        lambda: client.submit_test(path),
        lambda: client.requeue(running),
        lambda: client.cancel(running),
    ]
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = [pool.submit(ask) for ask in questions]
        knows = pool.submit(client.job_is_running, running)
    for number, answer in enumerate(answers):
        assert isinstance(answer.exception(), SlurmUnavailableError), (number, answer.exception())
    assert knows.result() is None
    assert run_state(run, None).phase is RunPhase.unknown

    cluster.start_controller()
    jobs = client.query_my_jobs()
    assert run_state(run, jobs).phase is RunPhase.running
    assert client.job_is_running(running) is True
    bench.cancel_all()
