"""In which order a pipeline stage runs its micro-batches, and how long it stands idle.

A schedule is a table: for each stage the forward and backward passes it carries out, in order.
`parallel.pipeline` carries it out; nothing here knows of tensors or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Pass(Enum):
    """One direction through a stage."""

    forward = "F"
    backward = "B"


@dataclass(frozen=True)
class Action:
    """One micro-batch through one stage in one direction."""

    kind: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


def one_f_one_b(*, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """What one stage does: some forward passes, then one forward, one backward in turn.

    A stage has at most `stages - stage` micro-batches in flight, so its memory for activations
    does not grow with their number. Fewer micro-batches than stages are allowed: they only
    make the bubble larger.

    Source: PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473, figure 4.

    >>> [str(action) for action in one_f_one_b(stage=0, stages=3, num_microbatches=4)]
    ['F0', 'F1', 'F2', 'B0', 'F3', 'B1', 'B2', 'B3']
    >>> [str(action) for action in one_f_one_b(stage=2, stages=3, num_microbatches=4)]
    ['F0', 'B0', 'F1', 'B1', 'F2', 'B2', 'F3', 'B3']
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not in 0..{stages - 1}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, not {num_microbatches}")
    warm_up = min(stages - stage - 1, num_microbatches)
    actions = [Action(Pass.forward, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(num_microbatches - warm_up):
        actions.append(Action(Pass.forward, warm_up + microbatch))
        actions.append(Action(Pass.backward, microbatch))
    cool_down = range(num_microbatches - warm_up, num_microbatches)
    actions.extend(Action(Pass.backward, microbatch) for microbatch in cool_down)
    return tuple(actions)


def schedule_table(*, stages: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The 1F1B actions of every stage, first stage first."""
    return tuple(
        one_f_one_b(stage=stage, stages=stages, num_microbatches=num_microbatches)
        for stage in range(stages)
    )


def bubble_share(
    table: Sequence[Sequence[Action]], *, forward_s: float = 1.0, backward_s: float = 2.0
) -> float:
    """The share of a step that an average stage stands idle, 0 to 1.

    Holds for: stages of equal cost and messages that take no time. For 1F1B it equals
    (stages - 1) / (micro-batches + stages - 1), whatever the two durations are.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1 (as a share of the whole
    step, where the paper divides by the ideal time).

    >>> bubble_share(schedule_table(stages=4, num_microbatches=8)) == 3 / 11
    True
    >>> bubble_share(schedule_table(stages=1, num_microbatches=8))
    0.0
    """
    seconds = {Pass.forward: forward_s, Pass.backward: backward_s}
    ends = _end_times(table, seconds)
    busy = sum(seconds[action.kind] for actions in table for action in actions)
    return 1.0 - busy / (max(ends.values()) * len(table))


def _end_times(
    table: Sequence[Sequence[Action]], seconds: dict[Pass, float]
) -> dict[tuple[int, Action], float]:
    """When each (stage, action) ends, if every stage starts its next one as soon as it can."""
    ends: dict[tuple[int, Action], float] = {}
    clocks = [0.0] * len(table)
    positions = [0] * len(table)
    remaining = sum(len(actions) for actions in table)
    while remaining:
        moved = False
        for stage, actions in enumerate(table):
            while positions[stage] < len(actions):
                action = actions[positions[stage]]
                needs = _needs(stage, action, stages=len(table))
                if not all(need in ends for need in needs):
                    break
                start = max([clocks[stage], *(ends[need] for need in needs)])
                clocks[stage] = ends[stage, action] = start + seconds[action.kind]
                positions[stage] += 1
                remaining -= 1
                moved = True
        if not moved:
            raise ValueError("the schedule dead-locks: every stage waits for another one")
    return ends


def _needs(stage: int, action: Action, *, stages: int) -> list[tuple[int, Action]]:
    """The (stage, action) pairs that must have ended before this action can start."""
    if action.kind is Pass.forward:
        return [(stage - 1, action)] if stage > 0 else []
    needs = [(stage, Action(Pass.forward, action.microbatch))]
    if stage < stages - 1:
        needs.append((stage + 1, action))
    return needs
