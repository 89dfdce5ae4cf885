from types import MethodType

import pytest
import torch

from veomni_hook.kernels.rotary.called_function import refuses, refuses_wide, replaced
from veomni_hook.kernels.rotary.variants import OP
from veomni_hook.kernels.selection.registry import load_attribute


def turn(q, k):
    return q, k


class FromHub(torch.nn.Module):
    def forward(self, q, k):
        return k, q


def as_module():
    """What the decorator of the package ``kernels`` makes of a function."""

    class Func(torch.nn.Module):
        kernel_layer_name = "rotary_pos_emb"

        def forward(self, *args, **kwargs):
            return turn(*args, **kwargs)

    return Func()


class Attention:
    def turn(self, q):
        return q


def test_functions_and_methods_are_upstreams():
    assert replaced(turn) is None
    assert replaced(Attention().turn) is None


def test_a_function_that_became_a_module_is_upstreams_until_a_kernel_replaces_it():
    module = as_module()
    assert replaced(module) is None
    module.forward = MethodType(FromHub.forward, module)
    assert "hub" in replaced(module)
    # What `kernelize` does where the hub has no kernel for the device.
    module.forward = MethodType(type(module).forward, module)
    assert replaced(module) is None
    module.forward = turn
    assert "hub" in replaced(module)


@pytest.mark.parametrize("other", [FromHub(), len, object()], ids=["module", "builtin", "object"])
def test_other_objects_are_not(other):
    assert "hub" in replaced(other)


def test_every_kernel_respects_a_hub_kernel_but_for_methods():
    """At the start of a method no other function is called."""
    assert refuses(None, 1, 2, FromHub()) and refuses(None, 1, 2, turn) is None
    for name, variant in OP.variants.items():
        if name in ("half_split_packed_heads", "sections"):
            assert variant.refuses is None
        else:
            assert "hub" in load_attribute(variant.refuses)(None, 1, FromHub())


def test_float32_formulas_refuse_float64():
    wide = torch.zeros(1, dtype=torch.float64)
    assert "float64" in refuses_wide(None, torch.zeros(1), wide, turn)
    assert refuses_wide(None, torch.zeros(1), 1, turn) is None and refuses_wide(None, FromHub())
    asked = {name for name, variant in OP.variants.items() if "refuses_wide" in (variant.refuses or "")}
    assert asked == {name for name in OP.variants if "fp32" in name}
