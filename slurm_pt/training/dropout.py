"""Dropout that no layout, restart or recomputation changes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.training.micro_batch import MicroBatch


class SampleDropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, sample, site) alone.

    So it is the same in any layout, in a recomputed forward pass and after a resume, and no
    random state has to be saved. All tp ranks draw the whole mask.
    """

    def __init__(self, probability: float, *, seed: int, site: str, axis: TensorAxis):
        super().__init__()
        self.probability = probability
        self.seed = seed
        self.site = site
        self.axis = axis

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:  # [seq (/ tp), batch, hidden]
        if self.probability == 0.0 or not self.training:
            return x
        local, batch, hidden = x.shape
        seq_len = local * self.axis.tp if self.axis.splits_sequence else local
        generator = torch.Generator(device=x.device)
        uniform = torch.empty((batch, seq_len, hidden), dtype=torch.float32, device=x.device)
        for row, sample in enumerate(micro_batch.samples):
            generator.manual_seed(seed_of(self.seed, micro_batch.step, sample, self.site))
            uniform[row].uniform_(generator=generator)
        dropped = uniform[:, self.axis.own_positions(seq_len)].transpose(0, 1) < self.probability
        return x.masked_fill(dropped, 0.0) * (1.0 / (1.0 - self.probability))


def seed_of(*parts: int | str) -> int:
    """A 32-bit seed from anything that identifies what is drawn (the CPU generator uses 32)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
