import os

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Groups of ranks, for one case each."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    server = Ranks(tmp_path_factory.mktemp("ranks"), shared / "ranks.lock")
    yield server
    server.stop()
