from __future__ import annotations

import pytest

from tests.ascend import double
from veomni_hook.kernels import ascend
from veomni_hook.kernels.registry import registry
from veomni_hook.kernels.state import STATE
from veomni_hook.kernels.system import System


@pytest.fixture(scope="session", autouse=True)
def operators():
    """The operators of torch_npu, on a CPU."""
    double.install()


@pytest.fixture
def called(monkeypatch):
    """The names of the operators that were called."""
    names = []
    call = ascend.call

    def note(operator, *args, **kwargs):
        names.append(operator)
        return call(operator, *args, **kwargs)

    monkeypatch.setattr(ascend, "call", note)
    return names


@pytest.fixture
def on_ascend(monkeypatch):
    """A CPU that counts as an Ascend device, with the torch_npu that is doubled."""
    monkeypatch.setattr(System, "detect", lambda device, names=(): System.named("ascend"))
    held = (STATE.choice, STATE.active, STATE.contexts)
    registry.version += 1
    yield
    STATE.choice, STATE.active, STATE.contexts = held
    registry.version += 1
    STATE.changed()
