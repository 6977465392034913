"""A file of numbers, read by place: from any thread, without a map.

Not a memory map: a page fault on a dead file system stops the thread with the interpreter's lock
held, so that a stop request could not be noticed, and one on a file that was cut meanwhile kills
the process without a word. pread lets the other threads run, and its failures are exceptions.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slurm_pt.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


class ByteFile:
    """An open file, closed with the last reference to it.

    Raises FileNotFoundError and other OSErrors with the file's name.
    """

    def __init__(self, path: Path):
        self.path = path
        self._handle = os.open(path, os.O_RDONLY)
        self.size_bytes = os.fstat(self._handle).st_size
        weakref.finalize(self, os.close, self._handle)

    def read_into(self, buffer: NDArray[np.uint8], offset: int) -> None:
        """Fills a contiguous buffer [bytes] with what the file holds from `offset` (bytes) on.

        Raises DataError where the file ends before that, OSError where it cannot be read.
        """
        done = 0
        while done < buffer.size:
            try:
                got = os.preadv(self._handle, [buffer.data[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            if got == 0:
                now_bytes = os.fstat(self._handle).st_size
                raise DataError(
                    f"{self.path} ends at byte {now_bytes}, where "
                    f"{offset + buffer.size} are needed: it was cut short while in use. To fix: "
                    "put the whole file back, or prepare it again."
                )
            done += got

    def read(self, dtype: str, *, count: int, offset: int) -> NDArray[Any]:
        """`count` numbers from `offset` (bytes) on."""
        numbers = np.empty(count, dtype=dtype)
        self.read_into(numbers.view(np.uint8), offset)
        return numbers
