from __future__ import annotations

import gc
import logging
import pickle

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from veomni_hook.errors import KernelError
from veomni_hook.kernels.registry import Kernel, Requirement, registry
from veomni_hook.kernels.rms_norm.torch import rms_norm
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.state import set_active, set_choice


@pytest.fixture
def slot():
    return Slot("rms_norm", "cast_before_weight", "some.module")


@pytest.fixture
def register():
    """Registers kernels for one test."""
    held = dict(registry._kernels)

    def add(**changes):
        name = {
            "op": "rms_norm",
            "variant": "cast_before_weight",
            "backend": "mine",
            "load": f"{__name__}:answer",
        }
        registry.add(Kernel(**{**name, **changes}))

    yield add
    registry._kernels.clear()
    registry._kernels.update(held)
    registry.version += 1


def answer(*_):
    return "mine"


def never(owner, *_):
    return "never"


def norm():
    return Qwen3RMSNorm(8)


X = torch.randn(2, 8)


def test_answers_with_the_chosen_kernel(slot):
    owner = norm()
    for choice, kernel, backend in [
        ("auto", rms_norm, "torch"),
        ("eager", None, "eager"),
        ("torch", rms_norm, "torch"),
    ]:
        set_choice(choice)
        assert slot.kernel(owner, X) is kernel
        assert slot.outcome(owner).backend == backend


def test_a_refusal_falls_through_and_is_remembered(slot):
    owner = norm()
    assert slot.kernel(owner, X.double()) is None
    assert "float64" in slot.outcome(owner).reason
    assert slot.kernel(owner, X) is rms_norm
    assert slot.outcome(owner).backend == "torch"


def test_is_silent_when_deactivated(slot):
    set_active(False)
    assert slot.kernel(norm(), X) is None
    set_active(True)
    assert slot.kernel(norm(), X) is rms_norm


def test_asks_candidates_in_turn(slot, register):
    register(priority=1, refuses=f"{__name__}:never")
    assert slot.kernel(norm(), X) is rms_norm
    register(backend="best", priority=2)
    assert slot.kernel(norm(), X) is answer


def test_losing_counts_under_auto_only(slot, register):
    register(priority=1, loses=f"{__name__}:never")
    assert slot.kernel(norm(), X) is rms_norm
    set_choice("rms_norm=mine")
    assert slot.kernel(norm(), X) is answer


def test_a_name_that_cannot_run_here_is_an_error(slot, register):
    register(requires=Requirement(("npu",)))
    set_choice("rms_norm=mine")
    with pytest.raises(KernelError, match="found cpu"):
        slot.kernel(norm(), X)


def test_unknown_names_are_errors():
    with pytest.raises(KernelError):
        Slot("rms_norm", "standard", "some.module")


@pytest.mark.parametrize("x", [torch.empty(2, 8, device="meta"), object(), None])
def test_operands_that_are_no_values(slot, x):
    assert slot.kernel(norm(), x) is None


def test_holds_no_module_alive(slot):
    owner = norm()
    slot.kernel(owner, X)
    assert len(slot._outcomes) == 1
    del owner
    gc.collect()
    assert not slot._outcomes


def test_leaves_no_trace_in_the_module(slot):
    owner = norm()
    before = dict(vars(owner))
    slot.kernel(owner, X)
    assert dict(vars(owner)) == before


def test_is_rebuilt_when_pickled(slot):
    slot.kernel(norm(), X)
    assert repr(pickle.loads(pickle.dumps(slot))) == repr(slot)


def test_says_once_what_it_picked(slot, caplog):
    with caplog.at_level(logging.INFO, "veomni_hook.kernels"):
        for _ in range(3):
            slot.kernel(norm(), X)
            set_choice("auto")
    assert [record.getMessage() for record in caplog.records] == [
        "some.module: rms_norm/cast_before_weight on cpu: torch (auto)"
    ]


class Guarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x):
        if (kernel := SLOT.kernel(self, x)) is not None:
            return kernel(x, self.weight, 1e-6)
        return x * self.weight


SLOT = Slot("rms_norm", "cast_before_weight", __name__)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_the_upstream_code_without_a_graph_break(backend):
    model = Guarded()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(X), X * model.weight)
    assert not torch.equal(model(X), X * model.weight)


def test_is_exported_as_the_upstream_code():
    model = Guarded()
    exported = torch.export.export(model, (X,))
    assert torch.equal(exported.module()(X), X * model.weight)


def test_changes_of_the_choice_do_not_recompile():
    model = Guarded()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for choice in ("auto", "eager", "torch"):
        set_choice(choice)
        compiled(X)
        model(X)
    assert counter.frame_count == 1
