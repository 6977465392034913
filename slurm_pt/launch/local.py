"""Runs of a manifest on this machine, without Slurm: the batch script and srun in one process.

`python -m slurm_pt.launch.local MANIFEST --parallel N` starts each run's ranks as processes of
this machine, passes the same decisions after each attempt, and starts it again where a Slurm job
would be requeued.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_pt.config.slurm_values import parse_time_limit_s
from slurm_pt.errors import SlurmPtError
from slurm_pt.files import read_json
from slurm_pt.launch.after_attempt import FINISHED, WANTS_REQUEUE
from slurm_pt.launch.attempt import begin_attempt, conclude, end_attempt, read_config_of
from slurm_pt.launch.preemption import StopCause
from slurm_pt.plan import Plan
from slurm_pt.run_dir import AttemptDir, RunDir, open_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLL_S = 0.1
KILL_WAIT_S = 30.0
"""Time that the other ranks have to leave once one has failed, as Slurm's KillWait."""


@dataclass
class LocalLauncher:
    """Starts ranks, watches them, and ends them together."""

    cancelled: threading.Event = field(default_factory=threading.Event)

    def run_to_the_end(self, run: RunDir) -> int:
        """All attempts of a run; the exit code of the last one."""
        while True:
            try:
                attempt = begin_attempt(run)
            except SlurmPtError as error:
                click.echo(f"slurm_pt: {error}", err=True)
                return error.exit_code
            if attempt is None:
                return FINISHED
            code, timed_out = self._run_attempt(run, attempt)
            cause = StopCause.timed_out if timed_out else StopCause.unknown
            cause = StopCause.cancelled if self.cancelled.is_set() else cause
            decision = end_attempt(attempt, srun_code=code, cause=cause)
            conclude(attempt, decision)
            click.echo(f"{run.name}: {decision.outcome.value}: {decision.reason}", err=True)
            if decision.action != "requeue":
                return decision.exit_code

    def _run_attempt(self, run: RunDir, attempt: AttemptDir) -> tuple[int, bool]:
        """The first bad exit code of the ranks (0: none), and whether the time limit ended them."""
        slurm = read_config_of(run).slurm
        limit_s = parse_time_limit_s(slurm.time) if slurm.time else None
        deadline = (
            None if limit_s is None else time.monotonic() + max(1, limit_s - slurm.signal_lead_s)
        )
        world_size = Plan.from_json(read_json(run.plan)).layout.world_size
        ranks = _start_ranks(run, attempt, world_size)
        timed_out, told = False, False
        while any(rank.poll() is None for rank in ranks):
            codes = [rank.returncode for rank in ranks]
            if any(code not in {None, FINISHED, WANTS_REQUEUE} for code in codes):
                _note_failures(attempt, codes)
                _end_all(ranks)
                break
            if not told and deadline is not None and time.monotonic() > deadline:
                timed_out = told = True
                _signal_all(ranks, signal.SIGUSR2)
            if not told and self.cancelled.is_set():
                told = True
                _signal_all(ranks, signal.SIGTERM)
            time.sleep(POLL_S)
        bad = [
            rank.returncode for rank in ranks if rank.returncode not in {FINISHED, WANTS_REQUEUE}
        ]
        wants = (
            WANTS_REQUEUE if any(rank.returncode == WANTS_REQUEUE for rank in ranks) else FINISHED
        )
        return (bad[0] if bad else wants), timed_out


def rank_environment(
    environ: Mapping[str, str],
    *,
    run: RunDir,
    attempt: AttemptDir,
    rank: int,
    world_size: int,
    key: str,
) -> dict[str, str]:
    """The environment of one local rank."""
    ours = {
        "SLURM_PT_RUN_DIR": str(run.path),
        "SLURM_PT_ATTEMPT_DIR": str(attempt.path),
        "SLURM_PT_LAUNCH_KEY": key,
        "SLURM_PT_RANK": str(rank),
        "SLURM_PT_WORLD_SIZE": str(world_size),
        "SLURM_PT_LOCAL_RANK": str(rank),
        "SLURM_PT_LOCAL_WORLD_SIZE": str(world_size),
        "SLURM_PT_NODE_RANK": "0",
        "SLURM_PT_NUM_NODES": "1",
    }
    # One compute thread a rank, unless the user says otherwise: ranks share this machine's cores.
    threads = {} if world_size == 1 else {"OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1")}
    return {**environ, **threads, **ours}


def _start_ranks(
    run: RunDir, attempt: AttemptDir, world_size: int
) -> list[subprocess.Popen[bytes]]:
    key = f"local-{secrets.token_hex(6)}"
    command = [sys.executable, "-u", "-m", "slurm_pt.worker", str(run.path)]
    ranks = []
    for rank in range(world_size):
        environ = rank_environment(
            os.environ, run=run, attempt=attempt, rank=rank, world_size=world_size, key=key
        )
        with attempt.rank_log(rank).open("ab") as log:
            ranks.append(
                subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )
    return ranks


def _signal_all(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _note_failures(attempt: AttemptDir, codes: Sequence[int | None]) -> None:
    """Names the ranks that failed, as srun does; one that was killed before those that miss it."""
    bad = [(c, rank) for rank, c in enumerate(codes) if c not in {None, FINISHED, WANTS_REQUEUE}]
    with attempt.srun_log.open("a", encoding="utf-8") as log:
        for code, rank in sorted(bad):  # a signal's code is negative
            how = f"Killed by signal {-code}" if code < 0 else f"Exited with exit code {code}"
            log.write(f"local: error: task {rank}: {how}\n")


def _end_all(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the ranks that are left after one has failed: they can only wait for it."""
    _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + KILL_WAIT_S
    for rank in ranks:
        try:
            rank.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--parallel", type=int, default=1, help="Runs at once.")
def main(manifest: Path, parallel: int) -> None:
    """Go through the runs of a manifest on this machine."""
    launcher = LocalLauncher()
    signal.signal(signal.SIGTERM, lambda *_: launcher.cancelled.set())
    runs = [open_run(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    with ThreadPoolExecutor(max_workers=parallel) as pool:
        codes = list(pool.map(launcher.run_to_the_end, runs))
    sys.exit(max(codes, default=0))


if __name__ == "__main__":
    main()
