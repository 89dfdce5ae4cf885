"""The node of an operation on given operands: equal computations become equal nodes.

Every rule of arithmetic and casts is exact in floating point, gradients included.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial

from veomni_hook.patches.graph.nodes import Node, constant, is_constant
from veomni_hook.patches.graph.operations import (
    FLOAT32,
    SAME_SHAPE,
    dtype_of,
    has_dimension,
    is_float,
    is_number,
)

__all__ = [
    "ELLIPSIS",
    "NONE",
    "binary",
    "branch",
    "cast",
    "compare",
    "item",
    "length",
    "negative",
    "normal_form",
    "power",
    "renormalised",
    "shape",
    "size",
    "sliced",
    "subscript",
    "updated",
]

_ROOTS = {0.5: "sqrt", -0.5: "rsqrt"}


def cast(operand: Node, dtype: Node, origin: ast.expr | None = None) -> Node:
    """``operand`` cast to a dtype; the operand itself if it has that dtype."""
    if dtype_of(operand) == dtype:
        return operand
    return Node("cast", (operand, dtype), None, origin)


def binary(op: str, left: Node, right: Node, origin: ast.expr | None = None) -> Node:
    """``add``, ``sub``, ``mul`` or ``div`` of two values.

    A minus moves out of a product and into a difference. ``x * x`` in float32 becomes a square. An operand
    that float32 promotes is cast. An integer literal with a floating-point operand becomes a float.
    """
    if op == "mul" and left == right and dtype_of(left) == FLOAT32:
        return Node("square", (left,), None, origin)
    if op in ("mul", "div") and "neg" in (left.op, right.op):
        one, other = (side.args[0] if side.op == "neg" else side for side in (left, right))
        inner = binary(op, one, other)
        return inner.at(origin) if left.op == right.op else negative(inner, origin)
    if op == "add" and right.op == "neg":
        return binary("sub", left, right.args[0], origin)
    if op == "add" and left.op == "neg":
        return binary("sub", right, left.args[0], origin)
    if op == "sub" and right.op == "neg":
        return binary("add", left, right.args[0], origin)
    return Node(op, (_promoted(left, right), _promoted(right, left)), None, origin)


def negative(operand: Node, origin: ast.expr | None = None) -> Node:
    """``-operand``."""
    if operand.op == "constant" and isinstance(operand.value, int | float):
        return constant(-operand.value, origin)
    if operand.op == "neg":
        return operand.args[0]
    return Node("neg", (operand,), None, origin)


def power(base: Node, exponent: Node, origin: ast.expr | None = None) -> Node:
    """``base ** exponent``; a square and, in float32, a root have operations of their own.

    In bfloat16 a power of -0.5 rounds differently from ``rsqrt``, and autocast on CUDA computes powers in
    float32, but not products and roots. For the same reason ``x * x`` becomes a square in float32 only.
    """
    if exponent.op == "constant":
        if exponent.value == 2:
            return Node("square", (base,), None, origin)
        if exponent.value in _ROOTS and dtype_of(base) == FLOAT32:
            return Node(_ROOTS[exponent.value], (base,), None, origin)
    return Node("pow", (base, exponent), None, origin)


def compare(op: str, left: Node, right: Node, origin: ast.expr | None = None) -> Node:
    """A comparison; ``a > b`` is ``b < a``, and two texts are equal or not."""
    if op == "eq" and isinstance(left.value, str) and left.op == right.op == "constant":
        return constant(left == right, origin)
    if op in ("gt", "ge"):
        return Node("lt" if op == "gt" else "le", (right, left), None, origin)
    return Node(op, (left, right), None, origin)


def branch(test: Node, met: Node, unmet: Node, origin: ast.expr | None = None) -> Node:
    """``met`` if ``test`` else ``unmet``; a negated test swaps the sides."""
    while test.op == "not":
        test, met, unmet = test.args[0], unmet, met
    if test.op == "constant":
        return met if test.value else unmet
    met = _side_of(test, met, 1)
    unmet = _side_of(test, unmet, 2)
    return met if met == unmet else Node("branch", (test, met, unmet), None, origin)


def updated(old: Node, new: Node) -> Node:
    """The value of a tensor ``old`` after an in-place operation that computes ``new``: the dtype stays."""
    dtype = dtype_of(old)
    return new if dtype is None else cast(new, dtype)


def _side_of(test: Node, node: Node, side: int) -> Node:
    """The side of a branch on the same test; any other node itself."""
    return node.args[side] if node.op == "branch" and node.args[0] == test else node


def _promoted(operand: Node, other: Node) -> Node:
    """``operand`` as the other operand promotes it."""
    other_dtype = dtype_of(other)
    if not is_float(other_dtype):
        return operand
    if operand.op == "constant" and type(operand.value) is int:
        return constant(float(operand.value), operand.origin)
    if other_dtype == FLOAT32 and not is_number(operand) and has_dimension(other):
        dtype = dtype_of(operand)
        if dtype is not None and dtype.value not in ("torch.float64", "torch.complex64"):
            return cast(operand, FLOAT32)
    return operand


NONE = constant(None)
ELLIPSIS = constant(...)
_ZERO = constant(0)
# Operations whose result may be a list as well as a tensor.
_LIST_OR_TENSOR = ("call", "attribute", "argument", "global", "item", "getattr")


def item(sequence: Node, number: int, origin: ast.expr | None = None) -> Node:
    """``sequence[number]``: of a tuple, a shape, the parts of a tensor, or anything else."""
    op = sequence.op
    if op == "tuple" and all(argument.op != "star" for argument in sequence.args):
        if -len(sequence.args) <= number < len(sequence.args):
            return sequence.args[number]
    elif op == "branch" and all(arm.op in ("tuple", "chunk", "split") for arm in sequence.args[1:]):
        test, met, unmet = sequence.args
        return branch(test, item(met, number), item(unmet, number), origin)
    elif op == "shape":
        return size(sequence.args[0], constant(number), origin)
    elif op == "unbind":
        return select(sequence.args[0], sequence.args[1], constant(number), origin)
    elif op == "split" and (part := _part_of_split(sequence, number, origin)) is not None:
        return part
    return Node("item", (sequence, constant(number)), None, origin)


def select(tensor: Node, dim: Node, index: Node, origin: ast.expr | None = None) -> Node:
    """``tensor.select(dim, index)``."""
    if is_constant(dim, 0) and index.op == "constant":
        return Node("item", (tensor, index), None, origin)
    return Node("select", (tensor, dim, index), None, origin)


def sliced(tensor: Node, dim: Node, bounds: Sequence[Node], origin: ast.expr | None = None) -> Node:
    """``tensor[start:stop:step]`` along one dimension; a start of 0 and a step of 1 are dropped."""
    start, stop, step = bounds
    start = NONE if is_constant(start, 0) else start
    step = NONE if is_constant(step, 1) else step
    if start == stop == step == NONE:
        return tensor
    return Node("slice", (tensor, dim, start, stop, step), None, origin)


def size(tensor: Node, dim: Node, origin: ast.expr | None = None) -> Node:
    """``tensor.shape[dim]``."""
    while tensor.op in SAME_SHAPE:
        tensor = tensor.args[0]
    return Node("size", (tensor, dim), None, origin)


def shape(tensor: Node, origin: ast.expr | None = None) -> Node:
    """``tensor.shape``."""
    while tensor.op in SAME_SHAPE:
        tensor = tensor.args[0]
    return Node("shape", (tensor,), None, origin)


def length(node: Node) -> int | None:
    """The number of elements of a sequence, if it is known."""
    if node.op == "tuple" and all(argument.op != "star" for argument in node.args):
        return len(node.args)
    return None


def subscript(value: Node, elements: Sequence[Node], *, single: bool, origin: ast.expr | None = None) -> Node:
    """``value[...]``.

    Args:
        value: the tensor or sequence that is indexed.
        elements: indices; a slice is ``bounds(start, stop, step)``.
        single: the subscript has no comma, so ``value`` may be a sequence instead of a tensor.
    """
    if single:
        (element,) = elements
        if element.op == "constant" and type(element.value) is int:
            return item(value, element.value, origin)
        if element.op == "bounds" and value.op in ("shape", "tuple", "bounds"):
            limits = [bound.value for bound in element.args if bound.op == "constant"]
            if len(limits) == 3 and length(value) is not None:
                bounds = slice(*(limit if type(limit) is int else None for limit in limits))
                return Node("tuple", value.args[bounds], None, origin)
            return Node("part", (value, *element.args), None, origin)
        if element.op == "bounds" and value.op in _LIST_OR_TENSOR:
            # Along the first dimension, slicing a list and slicing a tensor look the same.
            return sliced(value, _ZERO, element.args, origin)
    if all(
        element.op == "bounds"
        or (element.op == "constant" and (element.value in (None, ...) or type(element.value) is int))
        for element in elements
    ):
        return _basic(value, elements, origin)
    return Node("index", (value, *elements), None, origin)


def _basic(value: Node, elements: Sequence[Node], origin: ast.expr | None) -> Node:
    """Slices, integers, None and an ellipsis: one operation for each dimension that changes."""
    split = elements.index(ELLIPSIS) if ELLIPSIS in elements else len(elements)
    if ELLIPSIS in elements[split + 1 :]:
        return Node("index", (value, *elements), None, origin)
    result, dim = value, 0
    for element in elements[:split]:
        result = _index_dimension(result, dim, element)
        dim += not _is_integer(element)
    dim = -1
    for element in reversed(elements[split + 1 :]):
        result = _index_dimension(result, dim, element)
        dim -= not _is_integer(element)
    return result if result is value else result.at(origin)


def _is_integer(element: Node) -> bool:
    """Whether a basic index removes its dimension."""
    return element.op == "constant" and element.value is not None


def _index_dimension(value: Node, dim: int, element: Node) -> Node:
    if element.op == "bounds":
        return sliced(value, constant(dim), element.args)
    if element == NONE:
        return Node("unsqueeze", (value, constant(dim)))
    return select(value, constant(dim), element)


def _part_of_split(sequence: Node, number: int, origin: ast.expr | None) -> Node | None:
    """An element of ``split`` with two sizes, as a slice."""
    tensor, sizes, dim = sequence.args
    if sizes.op != "tuple" or len(sizes.args) != 2 or any(part.op == "star" for part in sizes.args):
        return None
    first = sizes.args[0]
    number %= 2
    bounds = (first, NONE, NONE) if number else (NONE, first, NONE)
    return sliced(tensor, dim, bounds, origin)


_Origin = ast.expr | None


def normal_form(op: str, args: Sequence[Node], origin: ast.expr | None = None) -> Node:
    """The normal form of an operation of `operations` with all its operands, in order."""
    normalise = _OF_OPERATIONS.get(op)
    if normalise is not None:
        return normalise(*args, origin)
    return Node(op, tuple(args), None, origin)


def renormalised(node: Node) -> Node:
    """The normal form of a node whose operands have changed."""
    normalise = _OF_NODES.get(node.op)
    if normalise is None or node.value is not None:
        return node
    return normalise(*node.args, node.origin)


def _item(sequence: Node, number: Node, origin: _Origin) -> Node:
    if type(number.value) is int:
        return item(sequence, number.value, origin)
    return Node("item", (sequence, number), None, origin)


def _scaled(op: str, left: Node, right: Node, alpha: Node, origin: _Origin) -> Node:
    if is_constant(alpha, 1):
        return binary(op, left, right, origin)
    return Node(f"{op}_scaled", (left, right, alpha), None, origin)


def _div(left: Node, right: Node, rounding: Node, origin: _Origin) -> Node:
    if rounding == NONE:
        return binary("div", left, right, origin)
    if rounding == constant("floor"):
        return Node("floordiv", (left, right), None, origin)
    return Node("div_rounded", (left, right, rounding), None, origin)


def _reduction(op: str, tensor: Node, dim: Node, keepdim: Node, dtype: Node, origin: _Origin) -> Node:
    if dim.op == "tuple" and len(dim.args) == 1 and dim.args[0].op != "star":
        dim = dim.args[0]
    return Node(op, (tensor, dim, keepdim, dtype), None, origin)


def _size(tensor: Node, dim: Node, origin: _Origin) -> Node:
    return shape(tensor, origin) if dim == NONE else size(tensor, dim, origin)


def _transpose(tensor: Node, first: Node, second: Node, origin: _Origin) -> Node:
    if type(first.value) is int and type(second.value) is int and first.value > second.value:
        first, second = second, first
    return Node("transpose", (tensor, first, second), None, origin)


def _where(condition: Node, met: Node, unmet: Node, origin: _Origin) -> Node:
    if met == unmet == Node("tuple"):
        return Node("nonzero", (condition, constant(value=True)), None, origin)
    return Node("where", (condition, met, unmet), None, origin)


# By the name of an operation in `operations`.
_OF_OPERATIONS: dict[str, Callable[..., Node]] = {
    "add": partial(_scaled, "add"),
    "sub": partial(_scaled, "sub"),
    "mul": partial(binary, "mul"),
    "div": _div,
    "neg": negative,
    "pow": power,
    "reciprocal": lambda tensor, origin: binary("div", constant(1.0), tensor, origin),
    "mean": partial(_reduction, "mean"),
    "sum": partial(_reduction, "sum"),
    "size": _size,
    "narrow": lambda tensor, dim, start, length, origin: sliced(
        tensor, dim, (start, length if is_constant(start, 0) else binary("add", start, length), NONE), origin
    ),
    "transpose": _transpose,
    "t": lambda tensor, origin: Node("transpose", (tensor, constant(0), constant(1)), None, origin),
    "select": select,
    "where": _where,
    # Only the layout in memory changes.
    "contiguous": lambda tensor, memory_format, origin: tensor,
    **{op: partial(compare, op) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
}

# By `Node.op`.
_OF_NODES: dict[str, Callable[..., Node]] = {
    **{op: partial(binary, op) for op in ("add", "sub", "mul", "div")},
    "neg": negative,
    "cast": cast,
    "branch": branch,
    "size": size,
    "shape": shape,
    "item": _item,
}
