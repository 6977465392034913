"""The wish to stop: signals become a flag, and nothing else happens in them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from slurm_pt.submit.states import JobPhase, job_phase

if TYPE_CHECKING:
    from slurm_pt.submit.slurm import StopView

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2})
"""TERM warns of a preemption, USR2 of the time limit. USR1 is left to NCCL, which has used it."""


INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C ended, as in shells."""


SECOND_WISH_S = 1.0
"""A second Ctrl-C that comes later than this is meant as one."""


def shield() -> None:
    """Blocks the stop signals in this process and in every process it will start.

    A signal that comes before `listen` stays pending and is seen then. Data-loading workers,
    forked or spawned, inherit the block: Slurm signals every process of a step, and a worker that
    dies of it takes the emergency save with it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@dataclass
class StopRequest:
    """Set once a stop signal has arrived."""

    signal_name: str | None = None
    time: float | None = None
    """When the first signal came (Unix seconds)."""
    _flag: threading.Event = field(default_factory=threading.Event)

    def is_set(self) -> bool:
        return self._flag.is_set()

    def set(self, signal_name: str) -> None:
        """Notes the first wish to stop; later ones change nothing."""
        if not self._flag.is_set():
            self.signal_name, self.time = signal_name, time.time()
            self._flag.set()


def listen(*, at_a_terminal: bool = False) -> StopRequest:
    """Starts the thread that turns stop signals into the flag.

    A thread in sigwait rather than a handler: a Python handler cannot run while the main thread
    sits in a collective. `at_a_terminal`: Ctrl-C asks to stop too, and a second one leaves at once.
    """
    signals = STOP_SIGNALS | {signal.SIGINT} if at_a_terminal else STOP_SIGNALS
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    request = StopRequest()
    thread = threading.Thread(target=_wait_for_signals, args=(request, signals), daemon=True)
    thread.name = "slurm_pt-signals"
    thread.start()
    return request


def _wait_for_signals(request: StopRequest, signals: frozenset[signal.Signals]) -> None:
    while True:
        number = signal.sigwait(signals)
        if number == signal.SIGINT:
            if request.time is not None and time.time() - request.time > SECOND_WISH_S:
                os._exit(INTERRUPTED)
            if request.is_set():  # the same key press: a shell signals the whole process group
                continue
            message = "stopping after this step, with a checkpoint; Ctrl-C again leaves at once"
            print(f"\nslurm_pt: {message}", file=sys.stderr, flush=True)  # noqa: T201
        request.set(signal.Signals(number).name)


class StopCause(Enum):
    """Why a job is asked to stop."""

    preempted = "preempted"
    timed_out = "timed out"
    cancelled = "cancelled"
    unknown = "unknown"


def stop_cause(view: StopView | None, *, now: float, signal_lead_s: float) -> StopCause:
    """The cause, from Slurm's own times; None: Slurm gave no answer. Never from elapsed time.

    Slurm sends the user's signal up to 60 s earlier than asked.
    """
    if view is None:
        return StopCause.unknown
    left_s = None if view.end_time is None else view.end_time - now
    if view.preempt_time is not None:
        return StopCause.preempted
    if view.state == "TIMEOUT" or view.reason == "TimeLimit":
        return StopCause.timed_out
    if view.state == "CANCELLED":
        return StopCause.cancelled
    if view.state == "COMPLETING":
        # After scancel the end is the moment of it. When somebody else requeues the job the end is
        # unset, or a whole new time limit (a minute at least) ahead; when a node dies, the reason
        # says so.
        is_over = left_s is not None and left_s <= 30
        cancelled = is_over and view.reason in {"", "None"}
        return StopCause.cancelled if cancelled else StopCause.unknown
    if job_phase(view.state) is JobPhase.running and left_s is not None:
        near = left_s <= signal_lead_s + 60 + 5
        return StopCause.timed_out if near else StopCause.unknown
    return StopCause.unknown
