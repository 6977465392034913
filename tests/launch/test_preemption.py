from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from slurm_pt.launch.preemption import StopCause, StopRequest, stop_cause
from slurm_pt.submit.slurm import StopView

NOW = 1_000_000.0
NONE = "None"


def view(state, end_in_s=None, preempted_s_ago=None, reason=NONE) -> StopView:
    end = None if end_in_s is None else NOW + end_in_s
    preempt = None if preempted_s_ago is None else NOW - preempted_s_ago
    return StopView(state, end, preempt, reason)


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        pytest.param(None, StopCause.unknown, id="no answer"),
        # What squeue of 22.05.8 showed of jobs that were stopped in each way.
        pytest.param(view("SIGNALING", 15, 0), StopCause.preempted, id="preempted"),
        pytest.param(view("RUNNING", None, 5), StopCause.preempted, id="preempted, no limit"),
        pytest.param(view("COMPLETING", -1, 20), StopCause.preempted, id="grace is over"),
        pytest.param(view("RUNNING", 120), StopCause.timed_out, id="warned of the limit"),
        pytest.param(view("RUNNING", 180), StopCause.timed_out, id="warned 60 s early"),
        pytest.param(
            view("COMPLETING", -2, reason="TimeLimit"), StopCause.timed_out, id="over the limit"
        ),
        pytest.param(view("TIMEOUT", -9), StopCause.timed_out, id="ended by the limit"),
        pytest.param(view("COMPLETING", 0), StopCause.cancelled, id="scancel"),
        pytest.param(view("CANCELLED", -3), StopCause.cancelled, id="cancelled"),
        # scontrol requeue by a person: the end is unset, or a whole new limit ahead.
        pytest.param(view("COMPLETING"), StopCause.unknown, id="requeued, no limit"),
        pytest.param(view("COMPLETING", 600), StopCause.unknown, id="requeued"),
        pytest.param(view("PENDING", reason="BeginTime"), StopCause.unknown, id="already requeued"),
        pytest.param(view("COMPLETING", 0, reason="NodeDown"), StopCause.unknown, id="node died"),
        pytest.param(view("NODE_FAIL", -1), StopCause.unknown, id="node failed"),
        pytest.param(view("FAILED", -1), StopCause.unknown, id="failed"),
        pytest.param(view("RUNNING", 86400), StopCause.unknown, id="a signal from anybody"),
        pytest.param(view("RUNNING"), StopCause.unknown, id="a signal, no limit"),
    ],
)
def test_the_cause_of_a_stop_comes_from_slurms_own_times_f28(seen, cause):
    assert stop_cause(seen, now=NOW, signal_lead_s=120) is cause


@pytest.mark.parametrize(
    ("limit_s", "age_s", "preempted"),
    [(120, 20, True), (86400, 86400 - 300, True), (120, 20, False)],
)
def test_a_short_job_is_preempted_only_if_slurm_says_so_f28(limit_s, age_s, preempted):
    seen = view("RUNNING", limit_s - age_s, 0 if preempted else None)
    expected = StopCause.preempted if preempted else StopCause.timed_out
    assert stop_cause(seen, now=NOW, signal_lead_s=120) is expected


def test_the_first_wish_to_stop_is_kept():
    request = StopRequest()
    assert not request.is_set()
    request.set("SIGTERM")
    first = request.time
    request.set("SIGUSR2")
    assert request.is_set()
    assert (request.signal_name, request.time) == ("SIGTERM", first)


def run_python(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_signal_becomes_a_flag_even_while_the_main_thread_is_busy(name):
    code = f"""
import os, signal
from slurm_pt.launch.preemption import listen
request = listen()
os.kill(os.getpid(), signal.{name})
sum(i * i for i in range(10**6)) and request._flag.wait(30)
print(request.is_set(), request.signal_name)
"""
    assert run_python(code) == f"True {name}\n"


def test_a_signal_that_comes_before_anybody_listens_is_not_lost():
    code = """
import os, signal
from slurm_pt.launch.preemption import listen, shield
shield()
os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
request = listen()
request._flag.wait(30)
print(request.is_set())
"""
    assert run_python(code) == "still here\nTrue\n"


def test_children_started_later_live_through_the_warning_f23():
    code = """
import os, signal, subprocess, sys, time
from slurm_pt.launch.preemption import shield
shield()
forked = os.fork()
if forked == 0:
    time.sleep(60)
    os._exit(0)
spawned = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE)
spawned.stdout.readline()
for pid in (forked, spawned.pid):
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGUSR2)
blocked = [open(f"/proc/{pid}/status").read().split("SigBlk:")[1].split()[0]
           for pid in (forked, spawned.pid)]
print(os.waitpid(forked, os.WNOHANG), spawned.poll(), len(set(blocked)))
os.kill(forked, signal.SIGKILL)
os.waitpid(forked, 0)
spawned.communicate(b"\\n")
"""
    assert run_python(code) == "(0, 0) None 1\n"


def test_other_signals_keep_their_meaning():
    code = """
import os, signal
from slurm_pt.launch.preemption import STOP_SIGNALS, listen
listen()
assert signal.SIGINT not in STOP_SIGNALS and signal.SIGUSR1 not in STOP_SIGNALS
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run_python(code) == "interrupted\n"


def test_usr1_is_left_to_nccl():
    from slurm_pt.launch.preemption import STOP_SIGNALS

    assert {signal.SIGTERM, signal.SIGUSR2} == STOP_SIGNALS
