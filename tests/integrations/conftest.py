import pytest

from tests.ascend.fixtures import called, operators  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def nothing_refused(caplog):
    """No call of a test here falls back to the formula, unless the test says so."""
    yield
    said = [each.getMessage() for each in caplog.records if each.name == "veomni_hook.kernels"]
    # torch's grouped products on a GPU.
    assert not [each for each in said if "grouped products are in bfloat16" not in each]
