"""Formulas of a reference file, matched against code."""

import ast

import pytest

from veomni_hook.patches.graph import (
    Difference,
    Scope,
    canonical,
    recognised,
    reference_form,
    reference_names,
    specific_first,
    variant_names,
)
from veomni_hook.patches.reasons import Reason

MLP = "kernels/gated_mlp/reference.py"


def form(text):
    tree = ast.parse(f"import torch\n{text}")
    scope = Scope(tree)
    return canonical(next(iter(scope.functions.values())), scope)


def test_the_names_are_those_of_the_table():
    assert reference_names(MLP) == tuple(sorted(variant_names("gated_mlp")))
    assert "pairs_fp32_as_query__cast_after_turn" in reference_names("kernels/rotary/reference.py")
    assert "turned_pairs" not in reference_names("kernels/rotary/reference.py")


def test_a_formula_comes_before_those_that_are_a_part_of_it():
    first, *_, last = specific_first("gated_mlp")
    assert (first, last) == ("scaled_sigmoid", "product")


def test_the_first_formula_that_the_code_is():
    found = recognised(MLP, form("def f(a, b, act): return b * act(a)"), {})
    assert not isinstance(found, Difference)
    name, made = found
    assert name == "product"
    assert {operand: node.value for operand, node in made.bindings.items()} == {
        "gate": "a",
        "up": "b",
        "activation": "act",
    }


def test_the_difference_names_the_nearest():
    text = "def f(x, w, e):\n    y = x.float()\n    y = y * torch.rsqrt(y.pow(3).mean(-1, keepdim=True) + e)\n    return w * y.to(x.dtype)"
    found = recognised("kernels/rms_norm/reference.py", form(text), {})
    assert isinstance(found, Difference)
    assert found.text.startswith("nearest is cast_before_weight: expected")
    assert found.lineno == 4


def test_what_comes_after_a_formula_is_told():
    text = "def f(x, w, e):\n    y = x.float()\n    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + e)\n    return torch.stack([w * y.to(x.dtype)])"
    found = recognised("kernels/rms_norm/reference.py", form(text), {})
    assert isinstance(found, Difference)
    assert "expected nothing after it, found stack" in found.text


def test_code_that_is_not_followed():
    found = recognised(MLP, Reason("a loop", line=7), {})
    assert found == Difference("a loop (line 7)", 0.0, 7)


def test_reference_functions():
    found = reference_form("kernels/rms_norm/reference.py", "cast_before_weight")
    assert found.arguments == ("hidden_states", "weight", "eps")
    with pytest.raises(ValueError, match="no function nothing"):
        reference_form("kernels/rms_norm/reference.py", "nothing")
