import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_globals

from veomni_hook.kernels.shared.module_calls import call_is_seen


def test_a_call_that_only_computes():
    module = nn.SiLU()
    assert call_is_seen(module) is None
    module.forward = module.forward
    assert call_is_seen(module) is None


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks(kind):
    module = nn.SiLU()
    handle = getattr(module, f"register_{kind}_hook")(lambda *_: None)
    assert call_is_seen(module) == "has hooks"
    handle.remove()
    assert call_is_seen(module) is None


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules(kind):
    handle = getattr(module_globals, f"register_module_{kind}_hook")(lambda *_: None)
    try:
        assert call_is_seen(nn.SiLU()) == "is subject to a global hook"
    finally:
        handle.remove()
    assert call_is_seen(nn.SiLU()) is None


def test_another_forward():
    module = nn.SiLU()
    module.forward = nn.ReLU().forward
    assert call_is_seen(module) == "has its own forward"


def test_compiled():
    module = nn.SiLU()
    module.compile()
    assert call_is_seen(module) == "is compiled separately"


def implemented(module, *_, **__):
    return 3.0


def test_what_torchs_call_asks_on_the_instance():
    module = nn.SiLU()
    module._call_impl = implemented.__get__(module)
    assert call_is_seen(module) == "has a _call_impl that is not torch's (SiLU)"


def test_what_torchs_call_asks_on_a_class():
    kind = type("SiLU", (nn.SiLU,), {"_call_impl": implemented})
    assert kind()(None) == 3.0
    assert call_is_seen(kind()) == "has a _call_impl that is not torch's (SiLU)"


def test_what_torchs_call_asks_of_all_modules(monkeypatch):
    monkeypatch.setattr(nn.Module, "_call_impl", implemented)
    assert call_is_seen(nn.SiLU()) == "has a _call_impl that is not torch's (SiLU)"


def test_a_module_swaps_its_class():
    module = nn.SiLU()
    module.__class__ = type("SiLU", (nn.SiLU,), {"__call__": implemented})
    assert call_is_seen(module) == "has a __call__ that is not torch's (SiLU)"


def test_every_name_that_torchs_call_reads_of_a_module_is_known():
    """A release of torch whose call asks for more fails here."""
    read = set()

    class Spied(nn.SiLU):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    module = Spied()
    read.clear()
    module(torch.ones(2))
    asked = {"_call_impl", "_compiled_call_impl", "forward", *HOOKS}
    assert read - {"inplace"} <= asked, "call_is_seen does not know all of these"


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
