"""The errors a user can mend, as one tree.

    SlurmPtError                    exit code 2, one message, no traceback
    ├── ConfigError                 a value in the configuration
    ├── RunFolderError              the run folder: not writable, owned by another job, damaged
    │   ├── DiskError               exit code 1: the disk is full or broken
    │   └── RunFinishedError        exit code 0: there is nothing left to do
    ├── SubmitError                 Slurm refused the job, or its commands are missing
    │   └── SlurmUnavailableError   no answer: nothing may be concluded from it
    ├── LaunchError                 ranks, nodes, rendezvous inside the allocation
    ├── CheckpointError             a checkpoint that cannot be written or read
    ├── DataError                   token files
    ├── DivergedError               gradients that are not finite
    └── DevClusterError             the development cluster

Anything else that is raised is a fault of ours or of the user's code and keeps its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class SlurmPtError(Exception):
    """Something the user asked for cannot be done; the message says what to set instead."""

    exit_code = 2


class RunFolderError(SlurmPtError):
    """The run folder cannot be written, is damaged, or belongs to another job."""


class DiskError(RunFolderError):
    """The disk is full or broken: not a mistake in what was asked, and it may pass."""

    exit_code = 1


class RunFinishedError(RunFolderError):
    """Nothing is left to do: the run is finished."""

    exit_code = 0


class SubmitError(SlurmPtError):
    """Slurm refused a request, or one of its commands is missing."""


class SlurmUnavailableError(SubmitError):
    """Slurm gave no answer. This says nothing about the jobs."""


class LaunchError(SlurmPtError):
    """The ranks of a job cannot be brought together."""


class CheckpointError(SlurmPtError):
    """A checkpoint cannot be written, or cannot be used."""


class DataError(SlurmPtError):
    """A token file is missing, damaged or too small."""


class DivergedError(SlurmPtError):
    """A gradient is not finite: the same steps again would end the same way."""


class DevClusterError(SlurmPtError):
    """The development cluster cannot be started, reached or stopped."""


@dataclass(frozen=True)
class Problem:
    """One broken rule: the key and value as asked, the rule, and what to set instead."""

    key: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        shown = "null" if self.value is None else self.value
        end = "" if self.rule.endswith("?") else "."
        return f"{self.key}={shown}: {self.rule}{end} To fix: {self.fix}."


class ConfigError(SlurmPtError):
    """All broken rules of a configuration, reported at once."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(str(self.problems[0]))
        else:
            lines = "\n".join(f"  - {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} problems in the configuration:\n{lines}")


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean X or Y?' for a name that is nearly a known one, else an empty string."""
    matches = get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
