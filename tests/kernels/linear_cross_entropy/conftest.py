import pytest

from tests.kernels.linear_cross_entropy.routed import load


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """The Qwen3 module with its loss routed, under a name of its own."""
    return load(tmp_path_factory.mktemp("routed"))
