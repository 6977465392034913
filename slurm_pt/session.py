"""The one run of this process.

A Hydra program's only argument is its config: this is how it hands the run that it started to
whoever ends the process.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol


class EndOfRun(Protocol):
    """What is owed once the program has returned or failed."""

    def succeed(self, result: object) -> int:
        """Writes done.json or the wish to run again; the exit code."""

    def fail(self, error: BaseException) -> int:
        """Writes down why this rank failed; the exit code."""


current_run: ContextVar[EndOfRun | None] = ContextVar("current_run", default=None)
