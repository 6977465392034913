"""Carries out a pipeline schedule: forward and backward passes, and the messages between stages.

Every message has the same shape, known beforehand, so nothing is negotiated. Dead-lock free:
what a stage sends after one action and what it receives for the next are posted together, and
a stage only ever waits for what it receives; messages between two stages keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slurm_pt.plan.schedule import Action, Pass, one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slurm_pt.parallel.groups import ProcessGroups

MicroBatchT = TypeVar("MicroBatchT")


@dataclass(frozen=True)
class Message:
    """What crosses the border of two stages: activations one way, their gradients the other."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def run_pipeline(
    forward: Callable[[Tensor | None, MicroBatchT], Tensor],
    micro_batches: Sequence[MicroBatchT],
    *,
    message: Message,
    groups: ProcessGroups,
) -> Tensor:
    """The mean loss of the micro-batches, and its gradient added to the parameters' `.grad`.

    `forward` takes what the stage before sent (None on the first stage) and a micro-batch; it
    gives what the next stage needs, or on the last stage the micro-batch's mean loss. The loss
    is a float64 scalar; 0 on all stages but the last. With one stage this is plain gradient
    accumulation.
    """
    stages, stage = groups.layout.pp, groups.place.pp_rank
    actions = one_f_one_b(stage=stage, stages=stages, num_microbatches=len(micro_batches))
    links = _Links(message, groups)
    share = 1.0 / len(micro_batches)
    loss = torch.zeros((), dtype=torch.float64, device=groups.device)
    in_flight: dict[int, _InFlight] = {}
    outgoing: Tensor | None = None
    previous: Action | None = None
    for action in actions:
        received = links.exchange(previous, outgoing, following=action)
        if action.kind is Pass.forward:
            if received is not None:
                received.requires_grad_()
            output = forward(received, micro_batches[action.microbatch])
            loss_grad = torch.full_like(output, share) if groups.last_stage else None
            if groups.last_stage:
                loss += output.detach() * share
            # The edge into the graph is all that backward needs: the output itself is freed as
            # soon as it is sent, and not kept for the micro-batches in flight.
            edge = get_gradient_edge(output)
            in_flight[action.microbatch] = _InFlight(received, edge, loss_grad)
            outgoing = output.detach()
            del output
        else:
            pending = in_flight.pop(action.microbatch)
            output_grad = pending.loss_grad if received is None else received
            torch.autograd.backward((pending.edge,), (output_grad,))
            outgoing = None if pending.entered is None else pending.entered.grad
            del pending
        previous = action
    links.exchange(previous, outgoing, following=None)
    links.finish()
    return loss


@dataclass(frozen=True)
class _InFlight:
    """A micro-batch between its forward and its backward pass through this stage."""

    entered: Tensor | None
    """What the stage before sent, and where its gradient will gather; None on the first stage."""
    edge: GradientEdge
    loss_grad: Tensor | None
    """d(mean loss) / d(this micro-batch's loss); None on all stages but the last."""


class _Links:
    """The messages with the stages before and after this one."""

    def __init__(self, message: Message, groups: ProcessGroups):
        ranks = groups.layout.pp_ranks(groups.rank)
        stage = groups.place.pp_rank
        self.message = message
        self.groups = groups
        self.before = None if groups.first_stage else ranks[stage - 1]
        self.after = None if groups.last_stage else ranks[stage + 1]
        self.sending: list[tuple[dist.Work, Tensor]] = []  # a tensor must live until it is sent

    def exchange(
        self, done: Action | None, outgoing: Tensor | None, *, following: Action | None
    ) -> Tensor | None:
        """What the next action needs from its neighbour; sends what the last one made.

        None if the next action needs nothing: a forward pass on the first stage, a backward
        pass on the last one.
        """
        destination = None if done is None else self._neighbour(done, incoming=False)
        source = None if following is None else self._neighbour(following, incoming=True)
        operations: list[dist.P2POp] = []
        group = self.groups.pp
        if destination is not None and outgoing is not None:
            outgoing = outgoing.contiguous()
            operations.append(dist.P2POp(dist.isend, outgoing, destination, group))
        received = None
        if source is not None:
            received = torch.empty(
                self.message.shape, dtype=self.message.dtype, device=self.groups.device
            )
            operations.append(dist.P2POp(dist.irecv, received, source, group))
        if operations:
            self._post(operations)
        return received

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()

    def _neighbour(self, action: Action, *, incoming: bool) -> int | None:
        """The rank that an action's input comes from, or that its output goes to."""
        from_before = (action.kind is Pass.forward) == incoming
        return self.before if from_before else self.after

    def _post(self, operations: list[dist.P2POp]) -> None:
        """Start the operations together; wait for what is received, not for what is sent."""
        self.sending = [(work, tensor) for work, tensor in self.sending if not work.is_completed()]
        works = dist.batch_isend_irecv(operations)
        if len(works) != len(operations):  # NCCL gives one handle for the whole batch
            for work in works:
                work.wait()
            return
        for operation, work in zip(operations, works, strict=True):
            if operation.op is dist.isend:
                self.sending.append((work, operation.tensor))
            else:
                work.wait()
