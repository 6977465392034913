"""What all users of the tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the default corpus is: the first run of the session makes it, which takes seconds."""
    return tmp_path_factory.mktemp("corpora")
