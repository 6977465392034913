"""In which order each rank of a pipeline runs its micro-batches.

A schedule is a table: for each rank of the pipeline the passes it carries out, in order. The
planner counts it (`schedule_cost`), `schedule_messages` derives who sends what to whom, and
`parallel.pipeline` carries it out; nothing here knows of tensors.

A model is cut into pp * virtual_stages stages. Rank r holds `virtual_stages` of them, its chunks:
chunk c of rank r is stage c * pp + r.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from slurm_pt.config.choices import Schedule


class Pass(Enum):
    """What is done with one micro-batch in one chunk."""

    forward = "F"
    backward = "B"
    """All gradients."""
    input_gradient = "I"
    """All gradients but those of the large matrices."""
    weight_gradient = "W"
    """What the input pass left out."""

    @property
    def goes_back(self) -> bool:
        """Whether it takes a gradient from the next stage and gives one to the stage before."""
        return self in {Pass.backward, Pass.input_gradient}


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one chunk of a rank."""

    kind: Pass
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.microbatch}{chunk}"


Table = tuple[tuple[Action, ...], ...]
"""The actions of every rank of a pipeline, first rank first."""


def make_table(
    schedule: Schedule, *, pp: int, num_microbatches: int, virtual_stages: int = 1
) -> Table:
    """The actions of every rank. Every number of micro-batches from 1 on is allowed.

    Raises ValueError for virtual stages without the interleaved schedule.
    """
    if min(pp, num_microbatches, virtual_stages) < 1:
        raise ValueError(
            f"pp={pp}, num_microbatches={num_microbatches} and virtual_stages={virtual_stages} "
            "must be at least 1"
        )
    if schedule is Schedule.interleaved:
        return interleaved(pp=pp, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    if virtual_stages != 1:
        raise ValueError(f"{schedule.value} has no virtual stages; interleaved has")
    make_rank = {
        Schedule.gpipe: gpipe,
        Schedule.one_f_one_b: one_f_one_b,
        Schedule.zero_bubble: zero_bubble,
    }[schedule]
    return tuple(
        make_rank(stage=rank, stages=pp, num_microbatches=num_microbatches) for rank in range(pp)
    )


def gpipe(*, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """All forward passes, then all backward passes: every micro-batch is in flight at once.

    Source: Huang et al. 2019, arXiv:1811.06965, figure 2c.

    >>> [str(action) for action in gpipe(stage=0, stages=2, num_microbatches=3)]
    ['F0', 'F1', 'F2', 'B0', 'B1', 'B2']
    """
    _check(stage, stages, num_microbatches)
    forwards, backwards = _in_order(num_microbatches)
    return tuple(forwards + backwards)


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
    _check(stage, stages, num_microbatches)
    forwards, backwards = _in_order(num_microbatches)
    return _alternate(forwards, backwards, warm_up=stages - stage - 1)


def zero_bubble(*, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """ZB-H1: 1F1B with the backward pass in two, and weight passes where 1F1B stands idle.

    Stage s puts each weight pass off until s more input passes are done. So every stage has at
    most as many micro-batches in flight, awaited weight passes included, as 1F1B's first stage.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2.1 (figure 3, top) and its handcrafted rule:
    the weight passes start later where there were fewer warm-up passes.

    >>> [str(action) for action in zero_bubble(stage=0, stages=2, num_microbatches=3)]
    ['F0', 'F1', 'I0', 'W0', 'F2', 'I1', 'W1', 'I2', 'W2']
    >>> [str(action) for action in zero_bubble(stage=1, stages=2, num_microbatches=3)]
    ['F0', 'I0', 'F1', 'I1', 'W0', 'F2', 'I2', 'W1', 'W2']
    """
    actions: list[Action] = []
    for action in one_f_one_b(stage=stage, stages=stages, num_microbatches=num_microbatches):
        if action.kind is Pass.forward:
            actions.append(action)
            continue
        actions.append(Action(Pass.input_gradient, action.microbatch))
        if action.microbatch >= stage:
            actions.append(Action(Pass.weight_gradient, action.microbatch - stage))
    left_over = range(max(0, num_microbatches - stage), num_microbatches)
    actions.extend(Action(Pass.weight_gradient, microbatch) for microbatch in left_over)
    return tuple(actions)


def interleaved(*, pp: int, num_microbatches: int, virtual_stages: int) -> Table:
    """1F1B over pp * virtual_stages stages, each rank taking turns between its chunks.

    The bubble is virtual_stages times smaller than 1F1B's, for as many times more messages and
    more activations in flight. Micro-batches go in groups of pp through one chunk after the
    other. The paper wants their number to be a multiple of pp; here the last group may be smaller,
    and costs the idle time of what it lacks.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2 and figure 4 (bottom); the
    numbers of warm-up passes are those of its implementation in Megatron-LM.

    >>> table = interleaved(pp=2, num_microbatches=2, virtual_stages=2)
    >>> " ".join(str(action) for action in table[1])
    'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1'
    """
    # A table of whole groups never dead-locks, nor does one from which micro-batches are taken out
    # on all ranks alike. Alternating over a smaller last group does (pp=4, 5 micro-batches).
    groups = [range(first, first + pp) for first in range(0, num_microbatches, pp)]
    chunks = range(virtual_stages)
    forwards = [Action(Pass.forward, m, c) for group in groups for c in chunks for m in group]
    backwards = [
        Action(Pass.backward, m, c) for group in groups for c in reversed(chunks) for m in group
    ]
    table = []
    for rank in range(pp):
        warm_up = 2 * (pp - rank - 1) + (virtual_stages - 1) * pp
        actions = _alternate(forwards, backwards, warm_up=warm_up)
        table.append(tuple(action for action in actions if action.microbatch < num_microbatches))
    return tuple(table)


def forward_table(*, pp: int, num_microbatches: int, virtual_stages: int = 1) -> Table:
    """Forward passes alone, for evaluation, in the order of the interleaved schedule.

    >>> forward_table(pp=2, num_microbatches=2)[1]
    (Action(kind=<Pass.forward: 'F'>, microbatch=0, chunk=0), \
Action(kind=<Pass.forward: 'F'>, microbatch=1, chunk=0))
    """
    whole = interleaved(pp=pp, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    return tuple(
        tuple(action for action in actions if action.kind is Pass.forward) for actions in whole
    )


def _check(stage: int, stages: int, num_microbatches: int) -> None:
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not in 0..{stages - 1}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, not {num_microbatches}")


def _in_order(num_microbatches: int) -> tuple[list[Action], list[Action]]:
    """Forward and backward passes of one chunk."""
    microbatches = range(num_microbatches)
    forwards = [Action(Pass.forward, microbatch) for microbatch in microbatches]
    return forwards, [Action(Pass.backward, microbatch) for microbatch in microbatches]


def _alternate(
    forwards: list[Action], backwards: list[Action], *, warm_up: int
) -> tuple[Action, ...]:
    """Some forward passes, then one forward, one backward in turn, then what is left."""
    warm_up = min(warm_up, len(forwards))
    actions = forwards[:warm_up]
    steady = len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
        actions += [forward, backward]
    return tuple(actions + backwards[steady:])
