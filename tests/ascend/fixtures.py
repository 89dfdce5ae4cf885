"""What tests of the backend `npu` stand on; conftests import it."""

import pytest
import torch

from tests.ascend import double
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.system import System
from veomni_hook.kernels.shared import ascend


@pytest.fixture(scope="session")
def operators():
    """The operators of torch_npu, on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("torch_npu has a double on a CPU alone")
    double.install()


@pytest.fixture
def called(monkeypatch, operators):
    """The names of the operators that were called, in order."""
    names = []
    call = ascend.call

    def note(operator, *args, **kwargs):
        names.append(operator)
        return call(operator, *args, **kwargs)

    monkeypatch.setattr(ascend, "call", note)
    return names


@pytest.fixture
def on_ascend(monkeypatch, operators):
    """A CPU that counts as an Ascend device, with the torch_npu that is doubled."""
    monkeypatch.setattr(System, "detect", lambda device, names=(): System.named("ascend"))
    registry.version += 1
    with registry.restored(), STATE.restored():
        yield
