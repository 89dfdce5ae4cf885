from __future__ import annotations

import dataclasses
import importlib
import types

import pytest
import torch
import torch._dynamo

from tests.ascend.fixtures import called, on_ascend, operators  # noqa: F401 - fixtures
from tests.kernels.interpreter import check_launches, hasten
from tests.kernels.matching import DEVICE
from tests.kernels.patched_qwen3 import load
from veomni_hook.kernels.selection.declaration import Requirement
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import registry


@pytest.fixture(scope="session", autouse=True)
def interpreter(request):
    """Makes Triton's interpreter faster, and lets it see what it would not."""
    hasten(look_for_overflows=request.config.getoption("markexpr") == "slow")
    if DEVICE == "cpu":
        check_launches()


@pytest.fixture(autouse=True)
def process_state():
    """Restores what tests choose, and shows that nothing in torch is rebound."""
    functions = dict(vars(torch.nn.functional))
    with STATE.restored():
        yield
    assert dict(vars(torch.nn.functional)) == functions


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """The patched Qwen3 module, under a name of its own."""
    return load(tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """The installed and the patched module of a family."""
    folder = tmp_path_factory.mktemp("patched")

    def found(family: str) -> tuple[types.ModuleType, types.ModuleType]:
        name = f"transformers.models.{family}.modeling_{family}"
        return importlib.import_module(name), load(folder, name)

    return found


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    """The name of a backend that runs on a CPU."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


@pytest.fixture
def split_early(monkeypatch):
    """Splits short rows of norms into two blocks, which the interpreter is done with sooner than with wide ones."""
    from veomni_hook.kernels.rms_norm import tiles, triton

    monkeypatch.setattr(tiles, "_SPLIT_FROM", 16)
    monkeypatch.setattr(tiles, "_LEAST_TAIL", 2)
    triton._backward_plan.cache_clear()
    yield
    triton._backward_plan.cache_clear()


@pytest.fixture
def in_parts(monkeypatch):
    """Processes short rows of norms in parts, too: up to the eight of the widest rows."""
    from veomni_hook.kernels.rms_norm import tiles, triton

    parts = ((40, 8, 4, True), (64, 8, 4, False), (tiles.MOST_COLUMNS, 32, 4, True))
    monkeypatch.setattr(tiles, "_WHOLE_COLUMNS", 8)
    monkeypatch.setattr(tiles, "_PARTS", parts)
    triton._backward_plan.cache_clear()
    yield
    triton._backward_plan.cache_clear()


@pytest.fixture
def anywhere():
    """Lets kernels run on a CPU that ask for a GPU, where Triton's are interpreted; nothing is compiled yet."""
    with registry.restored():
        for kernel in registry.kernels():
            if kernel.backend in {"triton", "liger"}:
                registry.replace(dataclasses.replace(kernel, requires=Requirement(triton=True)))
        torch._dynamo.reset()
        yield
