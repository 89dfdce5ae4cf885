import pytest

from veomni_hook.kernels.selection.process_choice import STATE


@pytest.fixture(autouse=True)
def _choice_restored():
    """What a test chooses ends with it."""
    with STATE.restored():
        yield
