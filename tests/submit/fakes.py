"""A Slurm client that keeps what it is asked; for tests of who asks what, not of Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_pt.errors import SubmitError
from slurm_pt.submit.slurm import SlurmClient

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class RecordingClient(SlurmClient):
    """Accepts jobs as 100, 200, ...; refuses scripts that contain one of `refuses`."""

    def __init__(self, *, refuses: Sequence[str] = (), limit: int = 99) -> None:
        super().__init__({"PATH": ""})
        self.refuses, self.limit = refuses, limit
        self.scripts: list[str] = []
        self.tested: list[str] = []
        self.cancelled: list[str] = []

    def submit(self, script: Path, *, arguments: Sequence[str] = ()) -> str:
        assert script.parent.is_dir()
        text = script.read_text()
        self._refuse(text)
        if len(self.scripts) == self.limit:
            raise SubmitError("Slurm refused the job: QOSMaxSubmitJobPerUserLimit")
        self.scripts.append(text)
        return str(100 * len(self.scripts))

    def submit_test(self, script: Path) -> str:
        self.tested.append(script.read_text())
        self._refuse(self.tested[-1])
        return ""

    def cancel(self, job_key: str) -> None:
        self.cancelled.append(job_key)

    def _refuse(self, text: str) -> None:
        for word in self.refuses:
            if word in text:
                raise SubmitError(f"Slurm refused the job: {word}")
