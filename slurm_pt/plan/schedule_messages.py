"""Who sends what to whom in a schedule, and when each end of a message is posted.

All messages of a pipeline stand in one order, the same on all ranks: by the time at which they
would leave if every pass took its share of a step. Activations and gradients go through a
communicator each, and a rank posts its ends on each of the two in that order: a send right after
the pass that made it, a receive one pass before the one that needs it, so that the message travels
meanwhile, but never before an earlier end.

This cannot dead-lock, even where a communicator carries out one operation after the other and a
send waits for its receive, as with NCCL. For everything waits only for what comes earlier in that
time: a message for the pass that made it, which ended then, and for the messages before it; a pass
for the message it needs, which left before it started, and for the passes before it. So nothing
waits for itself. It takes both communicators to make progress at once, which two small kernels can.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_pt.plan.schedule import Action, Pass, Table, forward_table, make_table
from slurm_pt.plan.schedule_cost import end_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_pt.config.choices import Schedule


@dataclass(frozen=True)
class Transfer:
    """One rank's end of a message."""

    sends: bool
    """False: it receives."""
    peer: int
    """Pipeline rank of the other end."""
    action: Action
    """On this rank: what made the message, or what needs it."""

    @property
    def goes_back(self) -> bool:
        """Whether it carries a gradient."""
        return self.action.kind.goes_back


@dataclass(frozen=True)
class Step:
    """An action, and the ends of messages to post before it, in this order."""

    posts: tuple[Transfer, ...]
    action: Action | None
    """None: the end, where the last sends are posted."""


@dataclass(frozen=True)
class Program:
    """All that one rank does, and where each of its actions passes its output on itself."""

    steps: tuple[Step, ...]
    local: frozenset[Action]
    """Actions whose output is needed by another chunk of the same rank: not a message (pp=1)."""


@functools.lru_cache(maxsize=16)  # a pure function: the cache saves a simulation in every step
def programs(
    schedule: Schedule, *, pp: int, num_microbatches: int, virtual_stages: int = 1
) -> tuple[Program, ...]:
    """The program of every rank of a pipeline. Raises ValueError as `make_table` does."""
    return programs_of(
        make_table(
            schedule, pp=pp, num_microbatches=num_microbatches, virtual_stages=virtual_stages
        )
    )


@functools.lru_cache(maxsize=16)
def forward_programs(
    *, pp: int, num_microbatches: int, virtual_stages: int = 1
) -> tuple[Program, ...]:
    """The programs of an evaluation: forward passes alone."""
    return programs_of(
        forward_table(pp=pp, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    )


def programs_of(table: Table) -> tuple[Program, ...]:
    """The program of every rank for any table. Raises ValueError for one that dead-locks."""
    ends: list[list[_End]] = [[] for _ in table]
    local: list[set[Action]] = [set() for _ in table]
    index = [{action: number for number, action in enumerate(actions)} for actions in table]
    for sender, number in _in_order_of_leaving(table):
        made = table[sender][number]
        receiver, needed = _destination(table, sender, made)
        if receiver == sender:
            local[sender].add(made)
            continue
        at = index[receiver][needed]
        ends[sender].append(_End(Transfer(True, receiver, made), number + 1, number + 1))
        ends[receiver].append(_End(Transfer(False, sender, needed), max(0, at - 1), at))
    return tuple(
        Program(_steps(actions, of_rank), frozenset(handed_on))
        for actions, of_rank, handed_on in zip(table, ends, local, strict=True)
    )


@dataclass(frozen=True)
class _End:
    """A transfer and the positions (before which action of the rank) where it may be posted."""

    transfer: Transfer
    wanted: int
    latest: int


def _in_order_of_leaving(table: Table) -> list[tuple[int, int]]:
    """(rank, number of the action) of everything that has to reach another stage."""
    # A backward pass takes about twice a forward pass, and each half of it as long as one.
    seconds = {
        Pass.forward: 1.0,
        Pass.backward: 2.0,
        Pass.input_gradient: 1.0,
        Pass.weight_gradient: 1.0,
    }
    pp, stages = len(table), _stages(table)
    leaving = []
    for rank, row in enumerate(end_times(table, seconds)):
        for number, end in enumerate(row):
            action = table[rank][number]
            stage = action.chunk * pp + rank
            if action.kind is Pass.forward and stage < stages - 1:
                # Of those that leave at once, the message further on comes first: then a rank
                # sends before it waits for more.
                leaving.append((end, -stage, rank, number))
            elif action.kind.goes_back and stage > 0:
                leaving.append((end, stage, rank, number))
    return [(rank, number) for _, _, rank, number in sorted(leaving)]


def _destination(table: Table, sender: int, made: Action) -> tuple[int, Action]:
    """The rank that needs what an action made, and what it needs it for."""
    pp = len(table)
    stage = made.chunk * pp + sender + (-1 if made.kind.goes_back else 1)
    return stage % pp, Action(made.kind, made.microbatch, stage // pp)


def _steps(actions: Sequence[Action], ends: Sequence[_End]) -> tuple[Step, ...]:
    """Each action with what is posted before it, on each communicator in the order of the ends."""
    posts: list[list[Transfer]] = [[] for _ in range(len(actions) + 1)]
    for goes_back in (False, True):
        latest = len(actions)
        bounds = []  # an end must not wait longer than any that come after it
        mine = [end for end in ends if end.transfer.goes_back is goes_back]
        for end in reversed(mine):
            latest = min(latest, end.latest)
            bounds.append(latest)
        position = 0
        for end, bound in zip(mine, reversed(bounds), strict=True):
            position = max(position, min(end.wanted, bound))
            posts[position].append(end.transfer)
    return tuple(
        Step(tuple(before), action) for before, action in zip(posts, [*actions, None], strict=True)
    )


def _stages(table: Table) -> int:
    return len(table) * (1 + max(action.chunk for actions in table for action in actions))
