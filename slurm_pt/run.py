"""A started run, from one rank's view.

Ranks, process groups, run folder, checkpoints, the wish to stop: our trainer is built on it, and a
loop of your own can be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_pt.config import JobConfig
from slurm_pt.errors import RunFolderError, SlurmPtError, SubmitError
from slurm_pt.files import read_json, write_json
from slurm_pt.launch.after_attempt import (
    FINISHED,
    USER_ERROR,
    WANTS_REQUEUE,
    Decision,
    ExitRecord,
    Outcome,
)
from slurm_pt.launch.attempt import conclude
from slurm_pt.launch.environment import RankInfo
from slurm_pt.launch.preemption import StopCause, StopRequest, stop_cause
from slurm_pt.monitor.progress import (
    Heartbeat,
    JobComment,
    record_metrics,
    render_comment,
    render_rate,
)
from slurm_pt.owner import check_ownership
from slurm_pt.plan import Plan
from slurm_pt.run_dir import AttemptDir, RunDir
from slurm_pt.submit.slurm import SlurmClient

if TYPE_CHECKING:
    from slurm_pt.checkpoint.checkpointer import Checkpointer
    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.parallel.shard import Shard

END_BARRIER_S = 60.0
"""How long a finished rank waits for its peers before it leaves without them."""


KILL_WAIT_FLOOR_S = 5.0
"""Slurm waits at least this long between the last TERM and KILL (KillWait's smallest value)."""


@dataclass(frozen=True)
class StopNotice:
    """Why the run is to stop and how long it may go on; the same on all ranks."""

    cause: StopCause
    deadline: float | None
    """Unix seconds; None: unknown."""


@dataclass
class Run:
    """What `slurm_pt.start` gives. Methods marked collective are called by all ranks alike."""

    config: JobConfig
    info: RankInfo
    plan: Plan
    folder: RunDir
    attempt: AttemptDir
    groups: ProcessGroups
    request: StopRequest
    heartbeat: Heartbeat
    comment: JobComment
    client: SlurmClient
    nonce: str
    """Proof of ownership: checked before anything is committed."""
    by_hand: bool
    """Started without our batch script: this process writes down how the attempt ended."""
    close_launch: Callable[[], None]
    timings_s: dict[str, float]
    """Seconds of each part of the start."""
    step: int = 0
    notice: StopNotice | None = None
    _checkpointer: Checkpointer | None = None
    _last_save: float = field(default_factory=time.monotonic)
    _last_log: float = field(default_factory=time.perf_counter)
    _results: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def world_size(self) -> int:
        return self.info.world_size

    @property
    def local_rank(self) -> int:
        return self.info.local_rank

    @property
    def device(self) -> Any:
        """The torch.device of this rank."""
        return self.groups.device

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    # ------------------------------------------------------------------------------ stopping

    def should_stop(self) -> bool:
        """Whether the run is to stop now: any rank's signal counts, all get the same answer.

        Collective: one tiny all-reduce. After True, `save` and return from the program; the job is
        then put back into the queue and resumes where it saved.
        """
        from slurm_pt.parallel.groups import agree

        if self.notice is None and agree(self.groups, self.request.is_set()):
            self.accept_stop()
        return self.notice is not None

    def accept_stop(self) -> StopNotice:
        """Finds out why the run is to stop, once all ranks know that it is. Collective."""
        if self.notice is None:
            self.heartbeat.enter("stop")
            self.heartbeat.beat(force=True)
            found = self._ask_for_cause() if self.rank == 0 else None
            self.notice = self._from_rank_0(found)
            self._record("stop_agreed", step=self.step, cause=self.notice.cause.value)
        return self.notice

    def _ask_for_cause(self) -> StopNotice:
        """Slurm's own times, in one RPC. No answer is no reason to wait: the grace is running."""
        if self.info.requeue_key is None:
            return StopNotice(StopCause.unknown, None)
        try:
            view = self.client.query_stop(self.info.requeue_key)
        except SubmitError:
            view = None
        cause = stop_cause(view, now=time.time(), signal_lead_s=self.config.slurm.signal_lead_s)
        return StopNotice(cause, view.end_time if view else None)

    # ----------------------------------------------------------------------------- checkpoints

    @property
    def checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            from slurm_pt.checkpoint.checkpointer import Checkpointer

            self._checkpointer = Checkpointer(
                self.folder.checkpoints,
                groups=self.groups,
                config=self.config.checkpoint,
                may_commit=lambda: check_ownership(self.folder, self.nonce),
                report=self._report_checkpoint,
            )
        return self._checkpointer

    def save_interval_is_over(self) -> bool:
        """Whether a periodic save is due by this rank's clock; rank 0's is the one to ask."""
        return time.monotonic() - self._last_save >= self.config.checkpoint.interval_s

    def save_due(self) -> bool:
        """Whether a periodic save is due; all ranks get rank 0's answer. Collective."""
        from slurm_pt.parallel.groups import agree

        return agree(self.groups, self.rank == 0 and self.save_interval_is_over())

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Saves the state of a step. Collective. In the background, unless the run is to stop.

        `state` holds objects with state_dict() and load_state_dict() (models, optimizers,
        schedulers), tensors, and plain values; every rank's values are the same, as under
        data-parallel training. The `state(optimizer)` of a split model gives each rank's parts,
        which load into any layout. The random state of each rank is added.
        """
        from slurm_pt.checkpoint.user_state import flatten

        tensors, shards, tree = flatten(state)
        self.save_tensors(step, tensors, shards=shards, common={"tree": tree})

    def save_tensors(
        self,
        step: int,
        tensors: dict[str, Any],
        *,
        shards: dict[str, Shard],
        common: dict[str, Any],
        own: dict[str, Any] | None = None,
    ) -> None:
        """Saves named tensors, each whole or the part that its shard says. Collective.

        `own` are tensors that belong to this rank alone.
        """
        from slurm_pt.checkpoint.random_state import capture_random_state

        self.step = step
        self.heartbeat.enter("save")
        self.checkpointer.save(
            step,
            tensors,
            shards=shards,
            rank_state={"random": capture_random_state()},
            common=common,
            own=own,
            wait=self.notice is not None,
        )
        self._last_save = time.monotonic()

    def last_save_fits(self, notice: StopNotice) -> bool:
        """Whether a save can end before the job is killed. Collective.

        Not if it took longer than what is left, and there is something to fall back to. A save
        that is cut off does no harm: it was never committed.
        """
        took_s, committed = self.checkpointer.last_save_s, self.checkpointer.last_committed
        left_s = None if notice.deadline is None else notice.deadline - time.time()
        fits = True
        if committed is not None and took_s is not None and left_s is not None:
            fits = took_s <= left_s + KILL_WAIT_FLOOR_S
        fits = bool(self._from_rank_0(fits))
        if not fits:
            self._record(
                "save_skipped",
                step=self.step,
                committed_step=committed,
                save_s=took_s,
                left_s=left_s,
            )
        return fits

    def rank_0_first(self, action: Callable[[], Any]) -> Any:
        """What `action` gave on rank 0, on all ranks, once it is done there. Collective."""
        return self._from_rank_0(action() if self.rank == 0 else None)

    def resume(self, state: dict[str, Any]) -> int:
        """Loads the newest checkpoint into the objects of `state`; the step it is of, or 0.

        Collective. Give the same keys as to `save`. Raises CheckpointError when there are
        checkpoints and none can be used: a run never starts afresh in silence.
        """
        from slurm_pt.checkpoint.random_state import restore_random_state
        from slurm_pt.checkpoint.user_state import load_user_state

        resumed = load_user_state(self.checkpointer, state)
        if resumed is None:
            return 0
        if resumed.rank_state is not None:
            restore_random_state(resumed.rank_state["random"])
        self.note_resumed(resumed.step, resumed.skipped)
        return resumed.step

    def note_resumed(self, step: int, skipped: tuple[str, ...], **figures: Any) -> None:
        """Puts on record where this attempt goes on, and what was passed over."""
        self.step = step
        self._record("resumed", step=step, skipped=list(skipped), **figures)

    # ---------------------------------------------------------------------------------- ending

    def report(self, **results: Any) -> None:
        """Adds plain values to done.json (rank 0's count)."""
        self._results |= results

    def log(self, step: int, *, steps: int, loss: float, **figures: float) -> None:
        """Puts a step on record: metrics.jsonl, heartbeat, and the job's comment."""
        now = time.perf_counter()
        step_s, self._last_log = now - self._last_log, now
        if self.rank == 0:
            line = {"step": step, "loss": loss, "step_s": step_s, **figures}
            record_metrics(self.folder, line | {"attempt": self.attempt.number})
        self.show(step=step, steps=steps, loss=loss, speed=f"{1 / step_s:.1f} steps/s")

    def show(
        self,
        *,
        step: int,
        steps: int,
        loss: float,
        tokens_per_s: float | None = None,
        speed: str = "",
    ) -> None:
        """Progress for `slurm-pt status`, for the log, and for squeue's comment (rank 0)."""
        self.step = self.heartbeat.step = step
        self.heartbeat.figures = {"steps": steps, "loss": loss, "tokens_per_s": tokens_per_s}
        written = self.heartbeat.beat()
        if self.rank == 0:
            text = render_comment(
                step=step,
                steps=steps,
                loss=loss,
                speed=speed or render_rate(tokens_per_s),
                attempt=self.attempt.number,
            )
            self.comment.update(text)
            if written or step == steps:
                print(text, flush=True)  # noqa: T201 - the rank's log, or the user's terminal

    def succeed(self, result: object) -> int:
        """The exit code after the program returned: done, or stopped on request. Collective."""
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if self.notice is not None:
            cause = self.notice.cause.value
            self._exit_record(WANTS_REQUEUE, f"stopped on request at step {self.step}", cause=cause)
            self._conclude_by_hand(
                Decision(
                    "stop",
                    Outcome.stopped if cause == "unknown" else Outcome(cause),
                    f"stopped on request at step {self.step}; the same command goes on from there",
                    WANTS_REQUEUE,
                )
            )
            if self.by_hand and self.rank == 0:
                say(f"stopped at step {self.step}; the same command goes on from there")
            self._leave()
            return WANTS_REQUEUE
        self._barrier()  # done.json means that every rank got here: without one there is none
        if self.rank == 0:
            done = {"step": self.step, "time": time.time(), **self._results}
            if result is not None:
                done["result"] = _plain(result)
            write_json(self.folder.done, done)
        self._exit_record(FINISHED, "finished")
        self._conclude_by_hand(Decision("none", Outcome.finished, "finished", FINISHED))
        if self.by_hand and self.rank == 0:
            say(f"finished: {self.path}")
        self._leave()
        return FINISHED

    def fail(self, error: BaseException) -> int:
        """The exit code after an exception. Not collective: the peers may be gone."""
        code = int(getattr(error, "exit_code", 1))
        text = str(error).strip() or "no message"
        kind = "" if isinstance(error, SlurmPtError) else f"{type(error).__name__}: "
        self._exit_record(code, kind + text[:2000])
        outcome = Outcome.user_error if code == USER_ERROR else Outcome.failed
        self._conclude_by_hand(
            Decision("stop", outcome, f"rank {self.rank}: {kind}{text[:2000]}", code)
        )
        self.close_launch()
        return code

    def _conclude_by_hand(self, decision: Decision) -> None:
        if self.by_hand and self.rank == 0:
            try:
                conclude(self.attempt, decision)
            except (OSError, RunFolderError) as problem:
                say(problem)

    def _exit_record(self, code: int, reason: str, *, cause: str | None = None) -> None:
        record = ExitRecord(
            rank=self.rank,
            host=os.uname().nodename,
            code=code,
            reason=reason,
            time=time.time(),
            step=self.step,
            cause=cause,
        )
        try:
            write_json(self.attempt.exit_record(self.rank), dataclasses.asdict(record))
        except RunFolderError as problem:  # the true cause must not be hidden by a full disk
            say(problem)
        self.heartbeat.phase = "end"
        self.heartbeat.beat(force=True)

    def _leave(self) -> None:
        """A last barrier, then the groups are closed; a hang here is cut off, not a failure."""
        import torch.distributed as dist

        try:
            self._barrier()
        except RuntimeError as error:
            say(f"at the end of the run: {error}")
        self.comment.close()
        self.groups.close()
        dist.destroy_process_group()
        self.close_launch()

    def _barrier(self) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        if self.world_size == 1:
            return
        dist.monitored_barrier(
            self.groups.background, timeout=timedelta(seconds=END_BARRIER_S), wait_all_ranks=True
        )

    # -------------------------------------------------------------------------------- plumbing

    def _from_rank_0(self, value: Any) -> Any:
        import torch.distributed as dist

        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self.groups.background)
        return box[0]

    def _record(self, event: str, **fields: Any) -> None:
        if self.rank == 0:
            with contextlib.suppress(OSError):  # a full disk must not end the training
                self.folder.record_event(event, attempt=self.attempt.number, **fields)

    def _report_checkpoint(self, event: str, figures: dict[str, Any]) -> None:
        figures = {name: value for name, value in figures.items() if name != "event"}
        if self.request.time is not None:
            figures["since_signal_s"] = round(time.time() - self.request.time, 3)
        self._record(event, **figures)
        if event == "checkpoint_failed" and self.rank == 0:
            say(f"the checkpoint of step {figures['step']} failed: {figures['reason']}")


def say(line: object) -> None:
    """Puts a line into this rank's log."""
    print(f"slurm_pt: {line}", file=sys.stderr, flush=True)  # noqa: T201


def _plain(result: object) -> object:
    """A program's result as JSON, or in words where it is none."""
    try:
        json.dumps(result, allow_nan=False)
    except (TypeError, ValueError):
        return repr(result)
    return result


def owner_nonce(attempt: AttemptDir) -> str:
    """The proof of ownership that the attempt's beginning put on record."""
    begin = read_json(attempt.begin)
    nonce: str = begin["owner"]["nonce"]
    return nonce
