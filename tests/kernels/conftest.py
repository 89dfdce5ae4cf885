from __future__ import annotations

import pytest
import torch

from tests.kernels.patched_qwen3 import load
from veomni_hook.kernels.state import STATE


@pytest.fixture(autouse=True)
def process_state():
    """Restores what tests choose, and shows that nothing in torch is rebound."""
    held = (STATE.choice, STATE.active, STATE.contexts)
    functions = dict(vars(torch.nn.functional))
    yield
    STATE.choice, STATE.active, STATE.contexts = held
    STATE.changed()
    assert dict(vars(torch.nn.functional)) == functions


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """The patched Qwen3 module, under a name of its own."""
    return load(tmp_path_factory.mktemp("patched"))
