"""What a running rank tells the world: its heartbeat file, the metrics, and the job's comment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_pt.config import MonitorConfig
from slurm_pt.files import append_json_line
from slurm_pt.run_dir import RunDir
from slurm_pt.submit.slurm import SlurmClient


@dataclass
class Heartbeat:
    """A small file for each rank: where it is and what it does. Rewritten now and then."""

    path: Path
    interval_s: float
    fixed: dict[str, Any]
    """What does not change: rank, host, pid, attempt."""
    phase: str = "start"
    step: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    _written: float = 0.0

    def beat(self, *, force: bool = False) -> bool:
        """Writes the file if it is due, and tells whether it was.

        A full disk must not end the training: errors are dropped.
        """
        now = time.time()
        if not force and now - self._written < self.interval_s:
            return False
        self._written = now
        record = {**self.fixed, "phase": self.phase, "step": self.step, **self.figures}
        temporary = self.path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps({**record, "time": round(now, 3)}), encoding="utf-8")
            temporary.replace(self.path)
        return True

    def enter(self, phase: str) -> None:
        """Notes the phase, for the next time the file is due."""
        self.phase = phase


def make_heartbeat(
    run: RunDir, monitor: MonitorConfig, *, rank: int, host: str, attempt: int
) -> Heartbeat:
    """The heartbeat of one rank, written once."""
    fixed = {"rank": rank, "host": host, "pid": os.getpid(), "attempt": attempt}
    heartbeat = Heartbeat(run.heartbeats / f"rank_{rank:05d}.json", monitor.heartbeat_s, fixed)
    heartbeat.beat(force=True)
    return heartbeat


@dataclass
class JobComment:
    """Progress in the job's comment, so that plain `squeue -o "%i %j %T %k"` shows it."""

    client: SlurmClient
    job_key: str | None
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    _last: float | None = None
    _command: subprocess.Popen[bytes] | None = None

    def update(self, text: str, *, force: bool = False) -> None:
        """Sends the text if it is due, without waiting for Slurm: training is never held up."""
        if self.job_key is None or self.interval_s == 0:
            return
        now = self.clock()
        if not force and self._last is not None and now - self._last < self.interval_s:
            return
        if self._command is not None and self._command.poll() is None:
            return  # the controller has not answered the last one yet
        self._last = now
        with contextlib.suppress(OSError):  # no scontrol in this container
            self._command = self.client.start(self.client.comment_command(self.job_key, text))

    def close(self) -> None:
        """Lets the last update end, for a moment."""
        if self._command is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._command.wait(timeout=2)


def render_comment(*, step: int, steps: int, loss: float, speed: str, attempt: int) -> str:
    """One line for squeue: no quotes, no line feed.

    >>> render_comment(step=1200, steps=5000, loss=2.3051, speed="51.2k tok/s", attempt=2)
    'step 1200/5000 loss 2.305 51.2k tok/s attempt 2'
    """
    return " ".join(f"step {step}/{steps} loss {loss:.3f} {speed} attempt {attempt}".split())


def render_rate(tokens_per_s: float | None) -> str:
    """Tokens per second for people.

    >>> render_rate(51234), render_rate(412.3), render_rate(None)
    ('51.2k tok/s', '412 tok/s', '')
    """
    if tokens_per_s is None:
        return ""
    return (
        f"{tokens_per_s / 1000:.1f}k tok/s" if tokens_per_s >= 1000 else f"{tokens_per_s:.0f} tok/s"
    )


def record_metrics(run: RunDir, record: dict[str, Any]) -> None:
    """One line in metrics.jsonl. Floats are written so that they read back bit for bit.

    A full disk must not end the training: the line is then missing.
    """
    with contextlib.suppress(OSError):
        append_json_line(run.metrics, record)
