"""Carries out a pipeline schedule: the passes of this rank, and the messages between stages.

What to do, and when to post which end of which message, is `plan.schedule_messages`' program of
this rank; why that order cannot dead-lock is told there. Every message has the same shape, known
beforehand, so nothing is negotiated. A rank waits only for what it receives: what it sends is
waited for at the end. Messages between two ranks keep their order, by which they are told apart.

Activations and gradients go through process groups of their own: on one NCCL communicator, whose
operations run one after the other, each would wait for messages the other way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_pt.config.choices import Schedule
from slurm_pt.parallel.pending_backward import PendingBackward
from slurm_pt.parallel.weight_gradients import WeightGradients
from slurm_pt.plan.schedule import Action, Pass
from slurm_pt.plan.schedule_messages import Program, Transfer, forward_programs, programs

if TYPE_CHECKING:
    from slurm_pt.parallel.groups import ProcessGroups

MicroBatchT = TypeVar("MicroBatchT")
Chunk = Callable[[Tensor | None, MicroBatchT], Tensor]
"""The forward pass of one chunk: takes what the stage before sent (None on the first stage) and a
micro-batch; gives what the next stage needs, or on the last stage the micro-batch's mean loss."""


@dataclass(frozen=True)
class Message:
    """What crosses the border of two stages: activations one way, their gradients the other."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def run_pipeline(
    chunks: Sequence[Chunk[MicroBatchT]],
    micro_batches: Sequence[MicroBatchT],
    *,
    message: Message,
    groups: ProcessGroups,
    schedule: Schedule = Schedule.one_f_one_b,
    weight_gradients: WeightGradients | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """The mean loss of the micro-batches, and its gradient added to the parameters' `.grad`.

    `chunks` are this rank's, first one first; chunk c of pipeline rank r is stage c * pp + r. The
    loss is a float64 scalar; 0 on all ranks but that of the last stage. With one stage this is
    plain gradient accumulation. `weight_gradients` is the object that the chunks' layers were
    made with; without it, zero_bubble's weight passes are empty. Gradients are `loss_scale` times
    those of the loss.

    Raises ValueError for several chunks without the interleaved schedule.
    """
    program = programs(
        schedule,
        pp=groups.layout.pp,
        num_microbatches=len(micro_batches),
        virtual_stages=len(chunks),
    )[groups.place.pp_rank]
    later = weight_gradients or WeightGradients()
    passes = _Passes(chunks, micro_batches, groups, later, loss_scale)
    links = _Links(program, message, groups)
    for step in program.steps:
        for transfer in step.posts:
            links.post(transfer)
        action = step.action
        if action is None:
            break
        if action.kind is Pass.forward:
            links.offer(action, passes.forward(action, links.take(action)))
        elif action.kind is Pass.weight_gradient:
            passes.weight_gradient(action)
        else:
            links.offer(action, passes.backward(action, links.take(action)))
    links.finish()
    return passes.loss


@torch.no_grad()
def run_forward_pipeline(
    chunks: Sequence[Chunk[MicroBatchT]],
    micro_batches: Sequence[MicroBatchT],
    *,
    message: Message,
    groups: ProcessGroups,
) -> Tensor:
    """The mean loss of the micro-batches, as `run_pipeline` gives it; no gradients."""
    program = forward_programs(
        pp=groups.layout.pp, num_microbatches=len(micro_batches), virtual_stages=len(chunks)
    )[groups.place.pp_rank]
    links = _Links(program, message, groups)
    share = 1.0 / len(micro_batches)
    loss = torch.zeros((), dtype=torch.float64, device=groups.device)
    for step in program.steps:
        for transfer in step.posts:
            links.post(transfer)
        if step.action is None:
            break
        entered = links.take(step.action)
        output = chunks[step.action.chunk](entered, micro_batches[step.action.microbatch])
        if groups.last_stage and step.action.chunk == len(chunks) - 1:
            loss += output * share
        else:
            links.offer(step.action, output)
    links.finish()
    return loss


@dataclass(frozen=True)
class _InFlight:
    """A micro-batch between its forward and its backward pass through a chunk."""

    entered: Tensor | None
    """What the stage before sent, and where its gradient will gather; None on the first stage."""
    backward: PendingBackward
    loss_grad: Tensor | None
    """d(mean loss) / d(this micro-batch's loss); None on all stages but the last."""


class _Passes:
    """The computations of this rank."""

    def __init__(
        self,
        chunks: Sequence[Chunk[MicroBatchT]],
        micro_batches: Sequence[MicroBatchT],
        groups: ProcessGroups,
        weight_gradients: WeightGradients,
        loss_scale: float,
    ):
        self.loss_scale = loss_scale
        self.chunks, self.micro_batches = chunks, micro_batches
        self.last_chunk = len(chunks) - 1 if groups.last_stage else None
        self.weight_gradients = weight_gradients
        self.loss = torch.zeros((), dtype=torch.float64, device=groups.device)
        self.in_flight: dict[tuple[int, int], _InFlight] = {}
        self.put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def forward(self, action: Action, entered: Tensor | None) -> Tensor | None:
        """What the next stage needs; None on the last stage."""
        if entered is not None:
            entered.requires_grad_()
        output = self.chunks[action.chunk](entered, self.micro_batches[action.microbatch])
        # The output itself is freed as soon as it is sent, and not kept while it is in flight.
        backward = PendingBackward(output)
        loss_grad = None
        if action.chunk == self.last_chunk:
            share = 1.0 / len(self.micro_batches)
            self.loss += output.detach() * share
            loss_grad = torch.full_like(output, share * self.loss_scale)
        self.in_flight[action.chunk, action.microbatch] = _InFlight(entered, backward, loss_grad)
        return output.detach() if loss_grad is None else None

    def backward(self, action: Action, output_grad: Tensor | None) -> Tensor | None:
        """The gradient for the stage before; None on the first stage."""
        pending = self.in_flight.pop((action.chunk, action.microbatch))
        gradient = pending.loss_grad if output_grad is None else output_grad
        if gradient is None:
            raise ValueError("a stage before the last needs the gradient of its output")
        if action.kind is Pass.input_gradient:
            with self.weight_gradients.collect() as put_off:
                pending.backward.run(gradient)
            self.put_off[action.chunk, action.microbatch] = put_off
        else:
            pending.backward.run(gradient)
        return None if pending.entered is None else pending.entered.grad

    def weight_gradient(self, action: Action) -> None:
        """What the input pass of the same chunk and micro-batch put off."""
        put_off = deque(self.put_off.pop((action.chunk, action.microbatch)))
        while put_off:
            put_off.popleft()()  # and its inputs are freed before the next one runs


class _Links:
    """The messages with the other ranks of this pipeline."""

    def __init__(self, program: Program, message: Message, groups: ProcessGroups):
        self.local = program.local
        self.message, self.device = message, groups.device
        self.ranks = groups.layout.pp_ranks(groups.rank)
        self.group_of = {False: groups.pp, True: groups.pp_backward}
        self.ready: dict[Action, Tensor] = {}  # made here, to be sent
        self.entering: dict[Action, tuple[dist.Work | None, Tensor]] = {}
        self.sending: list[tuple[dist.Work, Tensor]] = []  # a tensor must live until it is sent

    def post(self, transfer: Transfer) -> None:
        """Start one end of a message, and wait for nothing.

        Each operation is a batch of its own, so that NCCL gives each a handle of its own, and
        carries it out on the group's communicator: a bare isend would connect the pair first, and
        that waits for the peer.
        """
        if transfer.sends:
            tensor = self.ready.pop(transfer.action)
        else:
            tensor = torch.empty(self.message.shape, dtype=self.message.dtype, device=self.device)
        operation: Callable[..., dist.Work | None] = dist.isend if transfer.sends else dist.irecv
        group = self.group_of[transfer.goes_back]
        end = dist.P2POp(operation, tensor, self.ranks[transfer.peer], group)
        (work,) = dist.batch_isend_irecv([end])
        if transfer.sends:
            self.sending = [pair for pair in self.sending if not pair[0].is_completed()]
            self.sending.append((work, tensor))
        else:
            self.entering[transfer.action] = work, tensor

    def take(self, action: Action) -> Tensor | None:
        """What an action needs from another stage, once it is there; None if it needs nothing."""
        work, tensor = self.entering.pop(action, (None, None))
        if work is not None:
            work.wait()
        return tensor

    def offer(self, action: Action, output: Tensor | None) -> None:
        """Keep what an action made until it is posted; hand it on if this rank needs it itself."""
        if output is None:
            return
        if action in self.local:
            chunk = action.chunk + (-1 if action.kind.goes_back else 1)
            self.entering[Action(action.kind, action.microbatch, chunk)] = None, output
        else:
            self.ready[action] = output.contiguous()

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()
