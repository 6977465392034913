"""A small made-up language that a model can learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slurm_pt.training.corpus import prepare


def write_tokens(folder: Path) -> Path:
    """A token folder, made in `folder`."""
    draw = np.random.default_rng(0)
    words = ["ka", "lo", "mi", "nu", "tero", "sali", "vok"]
    text = " ".join(words[index] for index in draw.integers(0, len(words), 6000))
    (folder / "text").write_text(text)
    prepare([folder / "text"], folder / "out")
    return folder / "out"
