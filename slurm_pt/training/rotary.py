"""Rotary position embeddings: angles by frequency and place, and turning queries and keys by them.

Sources: Su et al. 2021, arXiv:2104.09864; the order of the halves and the llama3 stretching are
those of Hugging Face's Llama, so that its weights fit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from slurm_pt.config.choices import RopeScaling
from slurm_pt.config.schema import ModelConfig


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians per token of each pair of features, float32 [head_size / 2], stretched."""
    exponents = torch.arange(0, config.head_width, 2, dtype=torch.int64).float()
    frequencies = 1.0 / (config.rope_theta ** (exponents / config.head_width))
    if config.rope_scaling is RopeScaling.linear:
        return frequencies / config.rope_factor
    if config.rope_scaling is RopeScaling.llama3:
        return _stretch_low(frequencies, config)
    return frequencies


def _stretch_low(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Llama 3.1's: by how many turns a frequency makes within the original sequence length."""
    original = config.rope_original_seq_len or config.max_seq_len
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = original * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretched whole, 1: left alone
    return (1.0 - share) * frequencies / config.rope_factor + share * frequencies


class Rotary(nn.Module):
    """Turns queries or keys. The angles are computed once for the longest sequence seen."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.turn = Turn()
        self._cosine: Tensor | None = None
        self._sine: Tensor | None = None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[batch, heads, seq, head] -> the same, with places [batch, seq] or 0, 1, 2, ..."""
        cosine, sine = self._tables(x)
        if positions is not None:
            cosine, sine = cosine[positions].unsqueeze(1), sine[positions].unsqueeze(1)
        turned: Tensor = self.turn(x, cosine, sine)
        return turned

    def _tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin, [seq, head], in the format of x."""
        seq_len = x.shape[-2]
        cosine, sine = self._cosine, self._sine
        fits = cosine is not None and cosine.shape[0] >= seq_len
        if not fits or cosine is None or sine is None or cosine.dtype != x.dtype:
            # Angles in float32 whatever the format: in bfloat16 places beyond 256 would coincide.
            places = torch.arange(seq_len, dtype=torch.float32)
            angles = torch.outer(places, rotary_frequencies(self.config))
            both = torch.cat((angles, angles), dim=-1).to(x.device)
            cosine, sine = both.cos().to(x.dtype), both.sin().to(x.dtype)
            self._cosine, self._sine = cosine, sine
        return cosine[:seq_len], sine[:seq_len]


class Turn(nn.Module):
    """Turns each pair of features by its angle."""

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * cosine + turned * sine
