"""What the ranks printed, across attempts, and what Slurm's own tools said."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

from slurm_pt.errors import RunFolderError
from slurm_pt.files import find_json
from slurm_pt.run_dir import AttemptDir, RunDir

if TYPE_CHECKING:
    from pathlib import Path

FOLLOW_S = 0.5


def show_logs(
    run: RunDir, *, rank: int | None, attempt: int | None, follow: bool, out: TextIO
) -> None:
    """Prints a rank's log (None: of all ranks) of one attempt, or goes on as it grows.

    Ends with what srun said and what was decided, once the attempt has ended.
    """
    attempts = run.list_attempts()
    if not attempts:
        raise RunFolderError(_nothing_yet(run))
    chosen = attempts[-1] if attempt is None else run.attempt(attempt)
    if not chosen.path.is_dir():
        numbers = ", ".join(str(a.number) for a in attempts)
        raise RunFolderError(f"{run.path} has no attempt {attempt}. There are: {numbers}")
    ranks = len(list(chosen.logs.glob("rank_*.log")))
    if rank is not None and rank >= ranks > 0:
        raise RunFolderError(f"attempt {chosen.number} of {run.name} has ranks 0 to {ranks - 1}")
    positions: dict[Path, int] = {}
    while True:
        newest = run.list_attempts()[-1]
        is_last_look = not follow or newest.number > chosen.number or _is_over(run, chosen)
        _print_new(chosen, rank, positions, out, whole_lines=rank is None and not is_last_look)
        if not is_last_look:
            time.sleep(FOLLOW_S)
            continue
        _print_srun(chosen, out)
        if not follow or newest.number == chosen.number:
            return
        chosen = run.attempt(chosen.number + 1)
        out.write(f"--- attempt {chosen.number} ---\n")


def _print_new(
    attempt: AttemptDir,
    rank: int | None,
    positions: dict[Path, int],
    out: TextIO,
    *,
    whole_lines: bool,
) -> None:
    """Prints what has come since the last call; with `whole_lines` not yet what goes on."""
    paths = (
        [attempt.rank_log(rank)]
        if rank is not None
        else sorted(
            attempt.logs.glob("rank_*.log"), key=lambda path: int(path.stem.removeprefix("rank_"))
        )
    )
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek(positions.get(path, 0))
                data = file.read()
        except FileNotFoundError:
            continue
        if whole_lines:
            data = data[: data.rfind(b"\n") + 1]
        positions[path] = positions.get(path, 0) + len(data)
        text = data.decode(errors="replace")
        if rank is None and text:
            text = text if text.endswith("\n") else text + "\n"  # ranks do not mix within a line
            prefix = f"[{path.stem.removeprefix('rank_')}] "
            text = "".join(prefix + line for line in text.splitlines(keepends=True))
        out.write(text)
    out.flush()


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
