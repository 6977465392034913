"""What the model is fed on this rank: the dataset's samples as micro-batches on its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurm_pt.training.micro_batch import MicroBatch
from slurm_pt.training.prefetch import Prefetcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.config.schema import TrainConfig
    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.training.data import Places, TokenDataset


@dataclass(frozen=True)
class HostBatch:
    """This rank's samples of one step in the memory of the host; pinned for a CUDA device."""

    tokens: Tensor | None
    """int64 [samples, seq + 1]; None on stages that need none."""
    documents: Tensor | None
    """int32 [samples, seq]; None unless documents are masked."""


class Feed:
    """The micro-batches of this dp rank: its contiguous part of each global batch."""

    def __init__(
        self,
        dataset: TokenDataset,
        config: TrainConfig,
        groups: ProcessGroups,
        *,
        num_microbatches: int,
    ):
        self.dataset, self.config, self.groups = dataset, config, groups
        count = num_microbatches * config.micro_batch_size
        first = groups.place.dp_rank * count
        self.indices = range(first, first + count)

    def ahead(self, steps: range, *, prefetch: int) -> Prefetcher[HostBatch]:
        """A context that has up to `prefetch` steps' data ready before they are asked for."""
        return Prefetcher(self.host_batch, steps, ahead=prefetch)

    def host_batch(self, step: int) -> HostBatch:
        """This rank's samples of a step. Any thread may call it."""
        return self._host_batch(self.dataset.places(step, self.indices))

    def take(
        self, step: int, data: Prefetcher[HostBatch], *, give_up: Callable[[], bool]
    ) -> list[MicroBatch] | None:
        """The micro-batches of a step on the device; None if `give_up()` came before the data."""
        batch = data.take(step, give_up=give_up)
        return None if batch is None else self._micro_batches(step, batch)

    def blank(self, step: int) -> list[MicroBatch]:
        """Micro-batches of the right shape and without meaning.

        For a step that is not to count: other ranks may be in its collectives already, so a rank
        that has no data for it must still go through them.
        """
        rows, seq_len = len(self.indices), self.config.seq_len
        batch = HostBatch(
            tokens=torch.zeros((rows, seq_len + 1), dtype=torch.int64) if self._tokens else None,
            documents=(
                torch.zeros((rows, seq_len), dtype=torch.int32)
                if self.dataset.mask_documents
                else None
            ),
        )
        return self._micro_batches(step, batch)

    def validation(self, number: int) -> list[MicroBatch]:
        """The micro-batches of one batch of held-out samples, the same in every run and step."""
        places = self.dataset.validation_places(number, self.indices)
        return self._micro_batches(number, self._host_batch(places))

    @property
    def _tokens(self) -> bool:
        """Whether this stage sees ids: as inputs, or as targets."""
        return self.groups.first_stage or self.groups.last_stage

    def _host_batch(self, places: Places) -> HostBatch:
        dataset = self.dataset
        tokens = torch.from_numpy(dataset.tokens(places)) if self._tokens else None
        documents = None
        if dataset.mask_documents:
            documents = torch.from_numpy(dataset.documents(places))
        if self.groups.device.type == "cuda":
            # A new thread stands on device 0, and pinning there would open a context on it.
            torch.cuda.set_device(self.groups.device)
            tokens = None if tokens is None else tokens.pin_memory()
            documents = None if documents is None else documents.pin_memory()
        return HostBatch(tokens, documents)

    def _micro_batches(self, step: int, batch: HostBatch) -> list[MicroBatch]:
        device, size = self.groups.device, self.config.micro_batch_size
        # From pinned memory the copy runs beside the host; it is in order with what uses it.
        tokens = torch.empty(0, dtype=torch.int64)
        if batch.tokens is not None:
            tokens = batch.tokens.to(device, non_blocking=True)
        documents = batch.documents
        if documents is not None:
            documents = documents.to(device, non_blocking=True)
        base = step * self.config.global_batch_size
        return [
            MicroBatch(
                tokens=tokens[row : row + size] if batch.tokens is not None else tokens,
                samples=tuple(base + index for index in self.indices[row : row + size]),
                step=step,
                documents=None if documents is None else documents[row : row + size],
            )
            for row in range(0, len(self.indices), size)
        ]
