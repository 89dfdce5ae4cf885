"""Eager attention functions: what is recognised, what is not, and the edit."""

import inspect

import pytest
import torch

from tests.patches.idioms.applied import changed, executed, sites_of, spliced
from veomni_hook import use_kernels
from veomni_hook.kernels.attention import reference
from veomni_hook.patches.idioms.attention import find as attention
from veomni_hook.patches.site import Status

VARIANTS = ("sinks", "sinks_float32_softmax", "sinks_rescaled", "softcap")
HEAD = "from typing import Any\nimport torch\nfrom torch.nn import functional\nResult = object\n"
MODEL = """
class Functions:
    def get_interface(self, name, default):
        return default
ALL_ATTENTION_FUNCTIONS = Functions()
class SomeAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.num_key_value_groups, self.head_dim = 2, 8
        self.sinks = torch.nn.Parameter(torch.ones(4))
        self.name = "eager"
    def forward(self, query, key, value, mask):
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.name, eager_attention_forward
        )
        output, _ = interface(query, key, value, mask, self, scaling=0.3)
        return output
"""
NAME = "def eager_attention_forward("


def function(variant):
    helpers = inspect.getsource(reference._of_all_heads) + inspect.getsource(reference._repeated)
    text = inspect.getsource(getattr(reference, variant)).replace(f"def {variant}(", NAME)
    return helpers + text


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_default_of_the_look_up_asks_a_slot(variant):
    text = HEAD + function(variant) + MODEL
    found, use = sites_of(attention, text)
    assert (found.target, found.status, found.variant) == ("eager_attention_forward", Status.ROUTED, variant)
    assert (use.target, use.counted) == ("SomeAttention.forward", False)
    assert use.skips == {"eager_attention_forward": ("_repeated", "_of_all_heads")}
    assert f"self.name, veomni_attention_{variant}.at(self, eager_attention_forward)" in spliced(
        text, [found, use]
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_runs_in_the_place_of_the_function(variant):
    text = HEAD + function(variant) + MODEL
    plain, routed = executed(text), executed(text, sites_of(attention, text))
    owner = routed["SomeAttention"]()
    operands = [torch.randn(2, heads, 5, 8) for heads in (4, 2, 2)]
    mask = torch.zeros(2, 1, 5, 5)
    expected = plain["SomeAttention"].forward(owner, *operands, mask)
    with use_kernels("reference"):
        assert torch.equal(owner(*operands, mask), expected)
        slot = routed[f"veomni_attention_{variant}"]
        assert slot.outcome(owner).backend == "reference"
        # Not while the function, or one that it calls, is another.
        routed["_repeated"] = lambda states, groups: torch.zeros_like(states).repeat_interleave(groups, 1)
        assert not torch.equal(owner(*operands, mask), expected)
        assert "_repeated" in slot.outcome(owner).reason


CHANGED = {
    "another sign of the sink": ("torch.cat([scores, sink], dim=-1)", "torch.cat([scores, -sink], dim=-1)"),
    "the mask is multiplied": ("scores = scores + attention_mask", "scores = scores * attention_mask"),
    "another scale": (") * scaling", ") * scaling * 2"),
    "keys of other heads": ("keys, values = _of_all_heads(key, module), ", "keys, values = key, "),
}


@pytest.mark.parametrize("name", CHANGED)
def test_other_formulas_are_missed(name):
    text = function("sinks")
    old, new = CHANGED[name]
    (found,) = sites_of(attention, HEAD + changed(text, (old, new)) + MODEL)
    assert found.status is Status.MISSED
    assert found.reason


def test_a_decorated_or_repeated_function_is_missed():
    text = function("sinks").replace(NAME, f"@torch.no_grad()\n{NAME}")
    (found,) = sites_of(attention, HEAD + text + MODEL)
    assert found.reason == "it is decorated with torch.no_grad()"
    (found,) = sites_of(attention, HEAD + function("sinks") + function("sinks") + MODEL)
    assert found.reason == "it is not the only definition of its name"


def test_attention_without_sinks_and_softcap_is_no_candidate():
    text = "def eager_attention_forward(module, query):\n    return query\n"
    assert sites_of(attention, HEAD + text + MODEL.replace("self.sinks", "self.other")) == []


def test_a_function_of_another_file_is_named():
    (found,) = sites_of(attention, f"{HEAD}from .parts import eager_attention_forward\n{MODEL}")
    assert (found.status, found.counted) == (Status.UNBOUND, False)
    assert found.reason == "it is defined in .parts, and its calls here are not followed"


def test_without_a_look_up_nothing_is_routed():
    text = HEAD + function("sinks") + MODEL.replace("get_interface", "find")
    (found,) = sites_of(attention, text)
    assert (found.status, found.reason) == (Status.UNBOUND, "no method passes it to get_interface")
