"""What a schedule costs: when each of its passes ends, the idle time, the micro-batches in flight.

All hold for any table of `schedule`, for chunks of equal cost and messages that take no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_pt.plan.schedule import Action, Pass

if TYPE_CHECKING:
    from collections.abc import Sequence


def bubble_share(
    table: Sequence[Sequence[Action]],
    *,
    forward_s: float = 1.0,
    input_s: float = 1.0,
    weight_s: float = 1.0,
) -> float:
    """The share of a step that an average rank stands idle, 0 to 1.

    The durations are those of one chunk's passes, in any unit; a whole backward pass takes
    `input_s + weight_s`. With p ranks, m micro-batches, v virtual stages and equal durations:

    * GPipe and 1F1B: (p - 1) / (m + p - 1), whatever the durations are;
    * interleaved, m a multiple of p: (p - 1) / (v * m + p - 1), whatever the durations are;
    * ZB-H1, m at least p: (p - 1) / (3 * m + p - 1). With other durations a rank's idle time is
      (p - 1) * (forward_s + max(0, input_s - weight_s)), which for weight passes no longer than
      input passes is the paper's (p - 1) * (forward_s + input_s - weight_s).

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2 and Qi et al. 2023,
    arXiv:2401.10241, table 1 (as a share of the whole step, where the papers divide by the
    ideal time).

    >>> from slurm_pt.config.schema import Schedule
    >>> from slurm_pt.plan.schedule import make_table
    >>> bubble_share(make_table(Schedule.one_f_one_b, pp=4, num_microbatches=8)) == 3 / 11
    True
    >>> bubble_share(make_table(Schedule.one_f_one_b, pp=1, num_microbatches=8))
    0.0
    """
    seconds = {
        Pass.forward: forward_s,
        Pass.backward: input_s + weight_s,
        Pass.input_gradient: input_s,
        Pass.weight_gradient: weight_s,
    }
    last = max(max(row) for row in end_times(table, seconds))
    busy = sum(seconds[action.kind] for actions in table for action in actions)
    return 1.0 - busy / (last * len(table))


def peak_in_flight(table: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The most (chunk, micro-batch) pairs whose activations each rank holds at once.

    They are held from the forward pass to the whole backward pass, or to the weight pass, which
    still needs the inputs of the matrices. A chunk is 1 / virtual_stages of a rank's layers.

    >>> from slurm_pt.config.schema import Schedule
    >>> from slurm_pt.plan.schedule import make_table
    >>> peak_in_flight(make_table(Schedule.one_f_one_b, pp=4, num_microbatches=8))
    (4, 3, 2, 1)
    >>> peak_in_flight(make_table(Schedule.zero_bubble, pp=4, num_microbatches=8))
    (4, 4, 4, 4)
    """
    peaks = []
    for actions in table:
        held = most = 0
        for action in actions:
            if action.kind is Pass.forward:
                held += 1
                most = max(most, held)
            elif action.kind is not Pass.input_gradient:
                held -= 1
        peaks.append(most)
    return tuple(peaks)


def end_times(
    table: Sequence[Sequence[Action]], seconds: dict[Pass, float]
) -> tuple[tuple[float, ...], ...]:
    """When each action ends, if every rank starts its next one as soon as it can.

    Shaped like the table. Raises ValueError where every rank waits for another one for ever.
    """
    pp = len(table)
    stages = pp * (1 + max(action.chunk for actions in table for action in actions))
    done: dict[tuple[bool, int, int], float] = {}  # (goes back, stage, micro-batch)
    rows: list[list[float]] = [[] for _ in table]
    remaining = sum(len(actions) for actions in table)
    while remaining:
        before = remaining
        for rank, actions in enumerate(table):
            row = rows[rank]
            while len(row) < len(actions):
                action = actions[len(row)]
                stage = action.chunk * pp + rank
                needs = _needs(action, stage=stage, stages=stages)
                if any(need not in done for need in needs):
                    break
                free = row[-1] if row else 0.0
                end = max([free, *(done[need] for need in needs)]) + seconds[action.kind]
                row.append(end)
                remaining -= 1
                if action.kind is not Pass.weight_gradient:
                    done[action.kind.goes_back, stage, action.microbatch] = end
        if remaining == before:
            raise ValueError("the schedule dead-locks: every rank waits for another one")
    return tuple(tuple(row) for row in rows)


def _needs(action: Action, *, stage: int, stages: int) -> list[tuple[bool, int, int]]:
    """What must have ended before this action can start."""
    microbatch = action.microbatch
    if action.kind is Pass.forward:
        return [(False, stage - 1, microbatch)] if stage > 0 else []
    if action.kind is Pass.weight_gradient:
        return [(True, stage, microbatch)]
    needs = [(False, stage, microbatch)]
    if stage < stages - 1:
        needs.append((True, stage + 1, microbatch))
    return needs
