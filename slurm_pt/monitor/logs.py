"""What the ranks printed, across attempts, and what Slurm's own tools said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from slurm_pt.errors import RunFolderError
from slurm_pt.run_dir import AttemptDir, RunDir, find_json

FOLLOW_S = 0.5


def show_logs(
    run: RunDir, *, rank: int | None, attempt: int | None, follow: bool, out: TextIO
) -> None:
    """Prints a rank's log (None: of all ranks) of one attempt, or goes on as it grows."""
    attempts = run.list_attempts()
    if not attempts:
        raise RunFolderError(_nothing_yet(run))
    chosen = attempts[-1] if attempt is None else run.attempt(attempt)
    if not chosen.path.is_dir():
        numbers = ", ".join(str(a.number) for a in attempts)
        raise RunFolderError(f"{run.path} has no attempt {attempt}. There are: {numbers}")
    positions: dict[Path, int] = {}
    while True:
        grown = _print_new(chosen, rank, positions, out)
        if not follow:
            if not grown:
                _print_srun(chosen, out)
            return
        newest = run.list_attempts()[-1]
        if not grown and newest.number > chosen.number:
            chosen = run.attempt(chosen.number + 1)
            out.write(f"--- attempt {chosen.number} ---\n")
            continue
        if not grown and _is_over(run, chosen):
            _print_srun(chosen, out)
            return
        time.sleep(FOLLOW_S)


def _print_new(attempt: AttemptDir, rank: int | None, positions: dict[Path, int], out: TextIO) -> bool:
    """Prints what has come since the last call; whether there was anything."""
    paths = [attempt.rank_log(rank)] if rank is not None else sorted(
        attempt.logs.glob("rank_*.log"), key=lambda path: int(path.stem.removeprefix("rank_"))
    )
    grown = False
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek(positions.get(path, 0))
                data = file.read()
        except FileNotFoundError:
            continue
        if rank is None:  # whole lines only, so that ranks do not mix within one
            data = data[: data.rfind(b"\n") + 1]
        if data:
            grown = True
            positions[path] = positions.get(path, 0) + len(data)
            text = data.decode(errors="replace")
            prefix = "" if rank is not None else f"[{path.stem.removeprefix('rank_')}] "
            out.write("".join(prefix + line for line in text.splitlines(keepends=True)))
    out.flush()
    return grown


def _print_srun(attempt: AttemptDir, out: TextIO) -> None:
    """What srun said and what was decided: the place of the true cause if no rank could start."""
    if attempt.srun_log.exists() and (text := attempt.srun_log.read_text(errors="replace")).strip():
        out.write(f"--- srun ---\n{text}")
    end = find_json(attempt.end)
    if end is not None:
        out.write(f"--- attempt {attempt.number} {end['outcome']}: {end['reason']} ---\n")


def _is_over(run: RunDir, attempt: AttemptDir) -> bool:
    end = find_json(attempt.end)
    return run.done.exists() or (end is not None and end["action"] == "stop")


def _nothing_yet(run: RunDir) -> str:
    job = find_json(run.job)
    if job is None:
        return f"{run.path} was never started. Submit it with `slurm-pt submit --run {run.path}`"
    what = f"job {job['job_key']}" if job.get("job_key") else "its launcher"
    return (
        f"{run.path} has no attempt yet: {what} has not started. What the batch shell printed "
        f"would be in {job['folder']}"
    )
