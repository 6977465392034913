"""PowerSGD: gradients of matrices are sent as two thin factors, and what that loses is sent later.

Source: Vogels et al. 2019, arXiv:1905.13727, algorithms 1 (one power iteration from the last
step's Q, a warm start) and 2 (error feedback).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurm_pt.parallel.groups import start_all_reduce
from slurm_pt.parallel.reduction import AllReduce
from slurm_pt.plan.traffic import low_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch.distributed as dist
    from torch import nn


class PowerSGD:
    """A `Reduction` that sends each matrix [n, m] of gradients as P [n, rank] and Q [m, rank].

    M, a replica's gradient with what its earlier steps have lost, becomes P Q^T with
    P = orthonormal(sum of M Q_old) and Q = mean of M^T P; it remembers M - P Q^T. Vectors, and
    matrices that factors would not make half as large, are sent as they are; so is everything in
    the first `start_step` steps, when gradients change fast.

    Every replica must compute the same P from the same sum: one kind of processor for all.

    Args:
        buckets: the parameters of each buffer, in the buffers' order.
        rank: columns of P and Q, at least 1.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        *,
        group: dist.ProcessGroup,
        rank: int,
        start_step: int,
    ):
        self._group, self._start_step = group, start_step
        self._plain = AllReduce(group)
        self._buckets = [_Bucket.of(bucket, rank) for bucket in buckets]
        generator = torch.Generator().manual_seed(0)
        for bucket in self._buckets:  # the same on all replicas
            bucket.q.copy_(torch.empty(bucket.q.shape).normal_(generator=generator))
        self._pending: list[tuple[_Bucket, Tensor, Tensor, dist.Work | None]] = []
        self._to_keep: list[_Bucket] = []

    @torch.no_grad()
    def start(self, step: int, index: int, buffer: Tensor) -> None:
        if self._group.size() == 1:
            return
        if step < self._start_step:
            self._plain.start(step, index, buffer)
            return
        bucket = self._buckets[index]
        message = buffer.new_empty(bucket.p_numbers + bucket.whole_numbers)
        for matrix in bucket.matrices:
            m = matrix.of_errors(bucket.corrected)
            # Shares of a mean are added up to it; errors are those of the whole gradient.
            share = matrix.of_buffer(buffer)
            torch.add(matrix.of_errors(bucket.error), share, alpha=self._group.size(), out=m)
            torch.mm(m, matrix.of_q(bucket.q), out=matrix.of_p(message))
        end = bucket.p_numbers
        for whole in bucket.whole(buffer):
            message[end : end + whole.numel()] = whole
            end += whole.numel()
        work = start_all_reduce(message, self._group)
        self._pending.append((bucket, buffer, message, work))

    @torch.no_grad()
    def finish(self) -> None:
        self._plain.finish()
        sums_of_q = []
        for bucket, buffer, message, work in self._pending:
            if work is not None:
                work.wait()
            begin = bucket.p_numbers
            for whole in bucket.whole(buffer):
                whole.copy_(message[begin : begin + whole.numel()])
                begin += whole.numel()
            for matrix in bucket.matrices:
                p = matrix.of_p(message)
                p.copy_(torch.linalg.qr(p).Q)
                m = matrix.of_errors(bucket.corrected)
                torch.mm(m.t(), p, out=matrix.of_q(bucket.new_q))
            sums_of_q.append(start_all_reduce(bucket.new_q, self._group))
        for (bucket, buffer, message, _), work in zip(self._pending, sums_of_q, strict=True):
            if work is not None:
                work.wait()
            bucket.new_q.div_(self._group.size())
            for matrix in bucket.matrices:
                sent = matrix.of_buffer(buffer)
                torch.mm(matrix.of_p(message), matrix.of_q(bucket.new_q).t(), out=sent)
                matrix.of_errors(bucket.corrected).sub_(sent)
        self._to_keep = [bucket for bucket, *_ in self._pending]
        self._pending.clear()

    def keep(self) -> None:
        for bucket in self._to_keep:
            bucket.error, bucket.corrected = bucket.corrected, bucket.error
            bucket.q, bucket.new_q = bucket.new_q, bucket.q
        self._to_keep = []

    def state(self) -> dict[str, Tensor]:
        held = {}
        for index, bucket in enumerate(self._buckets):
            held[f"powersgd/error/{index}"] = bucket.error
            held[f"powersgd/q/{index}"] = bucket.q
        return held


@dataclass(frozen=True)
class _Matrix:
    """Where the parts of a matrix begin in the flat tensors of its bucket."""

    rows: int
    columns: int
    rank: int
    in_buffer: int
    in_errors: int
    in_p: int
    in_q: int

    def of_buffer(self, buffer: Tensor) -> Tensor:
        return _view(buffer, self.in_buffer, self.rows, self.columns)

    def of_errors(self, errors: Tensor) -> Tensor:
        return _view(errors, self.in_errors, self.rows, self.columns)

    def of_p(self, message: Tensor) -> Tensor:
        return _view(message, self.in_p, self.rows, self.rank)

    def of_q(self, q: Tensor) -> Tensor:
        return _view(q, self.in_q, self.columns, self.rank)


@dataclass
class _Bucket:
    """The matrices of a buffer, and what is remembered of them."""

    matrices: list[_Matrix]
    whole_parts: list[slice]
    """Of the buffer: what is sent as it is."""
    p_numbers: int
    whole_numbers: int
    error: Tensor
    """M - P Q^T of the last step that counted, in units of the gradient. Flat, as all of these."""
    q: Tensor
    corrected: Tensor
    """This step's M, then its M - P Q^T; it becomes `error` if the step counts."""
    new_q: Tensor

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], rank: int) -> _Bucket:
        matrices, whole_parts = [], []
        in_buffer = in_errors = in_p = in_q = whole_numbers = 0
        first = None
        for parameter in parameters:
            first = parameter if first is None else first
            size = parameter.numel()
            columns = low_rank(parameter.shape, rank)
            if columns is None:
                whole_parts.append(slice(in_buffer, in_buffer + size))
                whole_numbers += size
            else:
                n = parameter.shape[0]
                m = size // n
                matrices.append(_Matrix(n, m, columns, in_buffer, in_errors, in_p, in_q))
                in_errors, in_p, in_q = in_errors + size, in_p + n * columns, in_q + m * columns
            in_buffer += size
        if first is None:
            raise ValueError("a bucket without parameters")
        errors, q = first.detach().new_zeros(in_errors), first.detach().new_zeros(in_q)
        return cls(
            matrices,
            whole_parts,
            in_p,
            whole_numbers,
            error=errors,
            q=q,
            corrected=torch.zeros_like(errors),
            new_q=torch.zeros_like(q),
        )

    def whole(self, buffer: Tensor) -> Iterator[Tensor]:
        for part in self.whole_parts:
            yield buffer[part]


def _view(flat: Tensor, begin: int, rows: int, columns: int) -> Tensor:
    return flat[begin : begin + rows * columns].view(rows, columns)
