from __future__ import annotations

import pytest
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
