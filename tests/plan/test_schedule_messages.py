"""The messages of every schedule, carried out by a simulator that waits wherever NCCL would."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt.config.choices import Schedule
from slurm_pt.plan.schedule import Action, Pass, interleaved, make_table
from slurm_pt.plan.schedule_messages import Step, forward_programs, programs, programs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_pt.plan.schedule_messages import Program, Transfer

PP, COUNT, VIRTUAL = st.integers(1, 8), st.integers(1, 17), st.integers(1, 4)


@dataclass
class SimulatedRank:
    """One GPU: a stream of passes, and for each communicator a stream of sends and receives.

    The host only fills the streams. An operation starts when the one before it on its
    communicator has ended and all passes that were on the compute stream when it was posted have.
    """

    steps: Sequence[Step]
    passes_done: int = 0
    received: set[Action] = field(default_factory=set)
    queues: dict[bool, deque[tuple[int, Transfer]]] = field(
        default_factory=lambda: {False: deque(), True: deque()}
    )
    """By communicator, as `ProcessGroups` has them: activations on one, gradients on the other."""

    def __post_init__(self) -> None:
        for position, step in enumerate(self.steps):
            for transfer in step.posts:
                queue = self.queues[transfer.goes_back]
                queue.append((position, transfer))

    def started(self, group: bool) -> Transfer | None:
        """The operation that a communicator is at, once it may run."""
        queue = self.queues[group]
        if not queue or queue[0][0] > self.passes_done:
            return None
        return queue[0][1]

    def compute(self, needed: set[Action]) -> bool:
        """Run the passes whose input is there; whether there was one."""
        before = self.passes_done
        while (action := self.steps[self.passes_done].action) is not None:
            if action in needed and action not in self.received:
                break
            self.passes_done += 1
        return self.passes_done > before


def meet(ranks: list[SimulatedRank], sender: int, group: bool) -> bool:
    """End a send whose receive has started too. Messages of a pair are told apart by order."""
    send = ranks[sender].started(group)
    if send is None or not send.sends:
        return False
    receive = ranks[send.peer].started(group)
    if receive is None or receive.sends or receive.peer != sender:
        return False
    shift = -1 if send.goes_back else 1
    stage = send.action.chunk * len(ranks) + sender + shift
    chunk = stage // len(ranks)
    assert stage % len(ranks) == send.peer
    assert receive.action == Action(send.action.kind, send.action.microbatch, chunk), "mixed up"
    ranks[sender].queues[group].popleft()
    ranks[send.peer].queues[group].popleft()
    ranks[send.peer].received.add(receive.action)
    return True


def carry_out(made: Sequence[Program]) -> None:
    """Run all ranks until nothing moves; fails if something is left to do."""
    ranks = [SimulatedRank(program.steps) for program in made]
    needed = [
        {post.action for step in program.steps for post in step.posts if not post.sends}
        for program in made
    ]
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            moved |= rank.compute(needed[number])
            for group in (False, True):
                moved |= meet(ranks, number, group)
    for rank in ranks:
        assert rank.steps[rank.passes_done].action is None, "dead-lock: a pass never started"
        assert not any(rank.queues.values()), "dead-lock: a message never met its other end"


@given(schedule=st.sampled_from(Schedule), pp=PP, count=COUNT, virtual=VIRTUAL)
def test_no_schedule_dead_locks_on_nccl(schedule, pp, count, virtual):
    virtual = virtual if schedule is Schedule.interleaved else 1
    carry_out(programs(schedule, pp=pp, num_microbatches=count, virtual_stages=virtual))


@given(pp=PP, count=COUNT, virtual=VIRTUAL)
def test_no_evaluation_dead_locks_on_nccl(pp, count, virtual):
    carry_out(forward_programs(pp=pp, num_microbatches=count, virtual_stages=virtual))


def test_the_simulator_finds_the_dead_lock_of_receives_posted_too_early():
    # The middle rank waits for all activations before it sends any; the first rank, whose fourth
    # forward pass needs a gradient, never makes the later ones.
    early = []
    for program in programs(Schedule.one_f_one_b, pp=3, num_microbatches=6):
        receives = [p for step in program.steps for p in step.posts if not p.sends]
        steps = [
            Step(tuple(post for post in step.posts if post.sends), step.action)
            for step in program.steps
        ]
        steps[0] = Step((*receives, *steps[0].posts), steps[0].action)
        early.append(type(program)(tuple(steps), program.local))
    with pytest.raises(AssertionError, match="dead-lock"):
        carry_out(early)


@given(schedule=st.sampled_from(Schedule), pp=PP, count=COUNT, virtual=VIRTUAL)
def test_every_send_follows_its_pass_and_every_receive_is_posted_in_time(
    schedule, pp, count, virtual
):
    virtual = virtual if schedule is Schedule.interleaved else 1
    made = programs(schedule, pp=pp, num_microbatches=count, virtual_stages=virtual)
    table = make_table(schedule, pp=pp, num_microbatches=count, virtual_stages=virtual)
    for program, actions in zip(made, table, strict=True):
        assert [step.action for step in program.steps] == [*actions, None]
        for position, step in enumerate(program.steps):
            for post in step.posts:
                at = actions.index(post.action)
                assert position == at + 1 if post.sends else position <= at


def test_between_warm_up_and_cool_down_receives_travel_during_a_pass():
    # 1F1B, 4 ranks, 8 micro-batches. Rank 1 makes F0 F1, then 6 pairs, then two backward passes.
    # In warm-up the message leaves when this rank sends too, and its own send comes first.
    program = programs(Schedule.one_f_one_b, pp=4, num_microbatches=8)[1]
    actions = [step.action for step in program.steps]
    steady = range(actions.index(Action(Pass.backward, 0)), actions.index(Action(Pass.forward, 7)))
    for position, step in enumerate(program.steps):
        for post in step.posts:
            at = actions.index(post.action)
            if not post.sends and at in steady:
                assert position == at - 1, str(post.action)


def test_the_last_rank_sends_to_the_first_between_virtual_stages():
    first, _, last = programs(Schedule.interleaved, pp=3, num_microbatches=3, virtual_stages=2)
    wrapped = [post for step in last.steps for post in step.posts if post.peer == 0]
    assert [str(post.action) for post in wrapped if post.sends] == ["F0", "F1", "F2"]
    assert [str(post.action) for post in wrapped if not post.sends] == ["B0", "B1", "B2"]
    received = [p for step in first.steps for p in step.posts if p.peer == 2 and not p.sends]
    assert [str(post.action) for post in received] == ["F0.1", "F1.1", "F2.1"]


def test_one_rank_hands_its_chunks_outputs_on_itself():
    (program,) = programs_of(interleaved(pp=1, num_microbatches=1, virtual_stages=3))
    assert not any(step.posts for step in program.steps)
    assert {str(action) for action in program.local} == {"F0", "F0.1", "B0.1", "B0.2"}


def test_a_table_that_dead_locks_has_no_programs():
    forward, backward = Action(Pass.forward, 0), Action(Pass.backward, 0)
    with pytest.raises(ValueError, match="dead-locks"):
        programs_of(((backward, forward), (forward, backward)))
