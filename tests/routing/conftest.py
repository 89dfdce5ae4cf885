import pytest

from tests.kernels.conftest import process_state  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where patched sources are written."""
    return tmp_path_factory.mktemp("routing")
