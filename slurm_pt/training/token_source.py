"""What every form of stored tokens comes down to: one row of ids, cut into documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.training.byte_file import ByteFile
    from slurm_pt.training.sorted_offsets import Int64s


@dataclass(frozen=True)
class TokenSource:
    """Tokens that can be read at any place, by any thread."""

    name: str
    """The configuration key and its value, for messages."""
    file: ByteFile
    """Ids one after another, no header."""
    dtype: str
    """numpy's name of their format."""
    num_tokens: int
    vocab_size: int | None
    """One more than the largest id there can be; None: the files do not say."""
    tokenizer: str | None
    """Its name; None: the files do not say."""
    boundaries: Callable[[int, int], Int64s] | None
    """Where documents begin: every such place p (tokens) with low < p < high, in order and
    possibly twice; None: not asked for."""

    def read(self, starts: list[int], length: int) -> NDArray[Any]:
        """The ids from each start on, [len(starts), length], in the stored format."""
        ids = np.empty((len(starts), length), dtype=self.dtype)
        size = ids.dtype.itemsize
        for row, start in zip(ids.view(np.uint8), starts, strict=True):
            self.file.read_into(row, start * size)
        return ids
