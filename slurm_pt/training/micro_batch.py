"""What one forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass on one rank."""

    tokens: Tensor
    """int64 [batch, seq + 1]: inputs and, shifted by one, targets. Empty on stages between."""
    samples: tuple[int, ...]
    """The samples' indices, counted from the start of the run: step * global batch + i."""
    step: int
    documents: Tensor | None = None
    """int32 [batch, seq]: the document of each input token, counted from 0 within its sample; on
    every stage. None: samples are one piece of text (data.mask_documents is off)."""

    @cached_property
    def attention_mask(self) -> Tensor | None:
        """Which tokens (last) each token sees, bool [batch, 1, seq, seq]; None: all before it.

        With documents those of its own one.
        """
        if self.documents is None:
            return None
        same = self.documents.unsqueeze(2) == self.documents.unsqueeze(1)
        return same.tril().unsqueeze(1)

    @cached_property
    def positions(self) -> Tensor | None:
        """int64 [batch, seq]: each token's place in its document; None: its place in the row."""
        if self.documents is None:
            return None
        places = torch.arange(self.documents.shape[1], device=self.documents.device)
        begins = self.documents.new_ones(self.documents.shape, dtype=torch.bool)
        begins[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        last_begin = torch.where(begins, places, 0).cummax(dim=1).values
        return places - last_begin
