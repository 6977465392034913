import numpy as np
import pytest

from slurm_pt.training.corpus import prepare


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A token folder with words of a small made-up language, so that a model can learn."""
    folder = tmp_path_factory.mktemp("tokens")
    draw = np.random.default_rng(0)
    words = ["ka", "lo", "mi", "nu", "tero", "sali", "vok"]
    text = " ".join(words[index] for index in draw.integers(0, len(words), 6000))
    (folder / "text").write_text(text)
    prepare([folder / "text"], folder / "out")
    return folder / "out"
