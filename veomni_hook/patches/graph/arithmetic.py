"""Normal forms of arithmetic and casts. Every rule here is exact in floating point, gradients included."""

from __future__ import annotations

import ast

from veomni_hook.patches.graph.dtypes import FLOAT32, dtype_of, has_dimension, is_float, is_number
from veomni_hook.patches.graph.nodes import Node, constant

__all__ = ["binary", "branch", "cast", "compare", "negative", "power", "updated"]

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
    """A comparison; ``a > b`` is ``b < a``."""
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
