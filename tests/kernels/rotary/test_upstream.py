from __future__ import annotations

from types import MethodType

import pytest
import torch

from veomni_hook.kernels.registry import registry
from veomni_hook.kernels.rotary import OP
from veomni_hook.kernels.rotary.upstream import refuses, replaced


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


@pytest.mark.parametrize("other", [FromHub(), len, object()], ids=str)
def test_other_objects_are_not(other):
    assert "hub" in replaced(other)


def test_every_reference_respects_a_hub_kernel():
    assert refuses(None, 1, 2, FromHub()) and refuses(None, 1, 2, turn) is None
    references = {each.variant: each for each in registry.kernels("rotary") if each.backend == "reference"}
    assert {*references} == {*OP.variants}
    for each in references.values():
        assert each.refuses == "veomni_hook.kernels.rotary.upstream:refuses"
        assert each.load == OP.variants[each.variant].reference and not each.automatic
