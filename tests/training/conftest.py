import pytest

from tests.training.language import write_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A token folder with words of a small made-up language, so that a model can learn."""
    return write_tokens(tmp_path_factory.mktemp("tokens"))
