"""The table of operations agrees with torch."""

import inspect

import pytest
import torch
from torch.nn import functional

from tests.patches.graph.code import form, one
from veomni_hook.patches.graph import digest
from veomni_hook.patches.graph.operations import DTYPES, function, is_pure, method

FUNCTIONS = ["silu", "softmax", "log_softmax", "relu", "rms_norm", "layer_norm", "normalize"]
# Operand names and defaults as torch documents them.
METHODS = ["clamp", "transpose", "unsqueeze", "flatten", "chunk", "unbind", "narrow", "select", "index_add", "softmax",
           "masked_fill", "topk", "sort", "argsort", "amax", "cumsum", "add", "sub", "matmul", "scatter", "index_select", "roll"]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_torchs_signature(name):
    known = function(f"torch.nn.functional.{name}")
    assert known is not None
    found = inspect.signature(getattr(functional, name)).parameters.values()
    found = [parameter for parameter in found if parameter.name != "out"]
    defaults = [None if d is None else d.value for d in known.defaults]
    assert [p.name for p in found] == list(known.parameters)
    assert [None if p.default is p.empty else p.default for p in found] == defaults


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_torchs_operands(name):
    known = method(name)
    assert known is not None
    overloads = []
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        arguments = [a for a in schema.arguments if a.name != "out"]
        overloads.append([a.name if a.name != "self" else "input" for a in arguments])
    assert list(known.parameters) in overloads


def test_every_function_exists():
    from veomni_hook.patches.graph.operations import _OPERATIONS

    homes = {"t": torch, "f": functional, "m": torch.Tensor}
    missing = [
        (place, name) for place, name in _OPERATIONS if place in homes and not hasattr(homes[place], name)
    ]
    assert not missing


def test_dtypes_are_torchs():
    for alias, name in DTYPES.items():
        assert getattr(torch, alias.removeprefix("torch.")) is getattr(torch, name.removeprefix("torch."))


@pytest.mark.parametrize(
    ("path", "pure"),
    [
        ("torch.exp", True), ("torch.nn.functional.elu", True), ("torch.nn.functional.dropout", False),
        ("torch.rand", False), 
        ("builtins.len", True), ("builtins.print", False),
        ("somewhere.exp", False), 
    ],
)  # fmt: skip
def test_what_only_computes(path, *, pure):
    assert is_pure(path) is pure


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ("x.sum(-1, False)", "x.sum(-1, dtype=torch.int64)"),
        ("x.view(4, -1)", "x.view(torch.int16)"),
        ("torch.div(x, y)", "torch.div(x, y, rounding_mode='floor')"),
        ("x.gather(1, y)", "x.gather(1, y, sparse_grad=True)"),
        ("x.sort(-1)[0]", "x.sort(-1, True)[0]"),
    ],
)
def test_what_a_call_says_beside_the_usual_counts(known, other):
    assert digest(form(one(known, "x, y"))) != digest(form(one(other, "x, y")))


def test_bits_as_another_dtype_have_that():
    assert form(one("x.view(torch.int16).to(x.dtype)")).result.op == "cast"
