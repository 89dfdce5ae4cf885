from inspect import Parameter

import pytest

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.declaration import Op, Variant
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.slot.arguments import binder, operand_names

OPERANDS = {"query": Parameter.empty, "cos": Parameter.empty, "dim": 1}


@pytest.mark.parametrize(
    ("parameters", "args", "kwargs", "expected"),
    [
        ("", ("q", "c"), {}, ("q", "c", 1)),
        ("", ("q",), {"cos": "c", "dim": 2}, ("q", "c", 2)),
        ("query, cos", ("q", "c"), {}, ("q", "c", 1)),
        ("cos, query, dim=3", ("c", "q"), {}, ("q", "c", 3)),
        ("tensor->query, cos", ("q",), {"cos": "c"}, ("q", "c", 1)),
        ("tensor -> query, cos, axis->dim=-2", ("q", "c"), {}, ("q", "c", -2)),
        ("query, cos, position_ids=None, dim=1", ("q", "c", "ids", 4), {}, ("q", "c", 4)),
        ("query, *, cos, dim=1", ("q",), {"cos": "c"}, ("q", "c", 1)),
        ("query, /, cos", ("q", "c"), {}, ("q", "c", 1)),
        ("query, cos, **rest", ("q", "c"), {"other": 0}, ("q", "c", 1)),
    ],
)
def test_operands_come_in_the_ops_order(parameters, args, kwargs, expected):
    assert binder(parameters, OPERANDS)(*args, **kwargs) == expected


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), (("q",), {}), (("q", "c", 1, 2), {}), (("q", "c"), {"x": 1})]
)
def test_arguments_that_do_not_fit_are_a_type_error(args, kwargs):
    with pytest.raises(TypeError):
        binder("query, cos, dim=1", OPERANDS)(*args, **kwargs)


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ("query, cos->cosine", "no operand 'cosine'"),
        ("query", "no parameter maps to the operand 'cos'"),
        ("query, cos, dim=print()", "not a literal"),
        ("query, cos, dim=", "not a parameter list"),
        ("query: cos, lambda cos", "not a parameter list"),
        ("query, cos: [exit()], lambda", "not a parameter list"),
        ("query, cos: exit() or lambda dim", "not a parameter list"),
    ],
)
def test_malformed_parameters_are_refused(parameters, why):
    with pytest.raises(KernelError) as caught:
        binder(parameters, OPERANDS)
    assert why in caught.value.what


def formula(a, b, /, c=5, *, d=6):
    return a


@pytest.fixture
def declared():
    with registry.restored():
        yield lambda **variants: registry.add_op(Op("toy", variants))


def test_operands_are_the_references_parameters_unless_named(declared):
    declared(
        all=Variant("", f"{__name__}:formula"),
        some=Variant("", f"{__name__}:formula", operands=("c", "a", "x")),
    )
    assert operand_names("toy", "all") == {"a": Parameter.empty, "b": Parameter.empty, "c": 5}
    assert list(operand_names("toy", "some")) == ["c", "a", "x"]
    assert operand_names("toy", "some") == {"c": 5, "a": Parameter.empty, "x": Parameter.empty}
