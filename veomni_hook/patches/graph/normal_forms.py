"""The node of an operation on given operands: equal computations become equal nodes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial

from veomni_hook.patches.graph import arithmetic, indexing
from veomni_hook.patches.graph.indexing import NONE
from veomni_hook.patches.graph.nodes import Node, constant, is_constant

__all__ = ["normal_form", "renormalised"]

_Origin = ast.expr | None


def normal_form(op: str, args: Sequence[Node], origin: ast.expr | None = None) -> Node:
    """The normal form of an operation of `torch_operations` with all its operands, in order."""
    normalise = _OF_OPERATIONS.get(op)
    if normalise is not None:
        return normalise(*args, origin)
    return Node(_RENAMED.get(op, op), tuple(args), None, origin)


def renormalised(node: Node) -> Node:
    """The normal form of a node whose operands have changed."""
    normalise = _OF_NODES.get(node.op)
    if normalise is None or node.value is not None:
        return node
    return normalise(*node.args, node.origin)


def _item(sequence: Node, number: Node, origin: _Origin) -> Node:
    if type(number.value) is int:
        return indexing.item(sequence, number.value, origin)
    return Node("item", (sequence, number), None, origin)


def _scaled(op: str, left: Node, right: Node, alpha: Node, origin: _Origin) -> Node:
    if is_constant(alpha, 1):
        return arithmetic.binary(op, left, right, origin)
    return Node(f"{op}_scaled", (left, right, alpha), None, origin)


def _div(left: Node, right: Node, rounding: Node, origin: _Origin) -> Node:
    if rounding == NONE:
        return arithmetic.binary("div", left, right, origin)
    if rounding == constant("floor"):
        return Node("floordiv", (left, right), None, origin)
    return Node("div_rounded", (left, right, rounding), None, origin)


def _reduction(op: str, tensor: Node, dim: Node, keepdim: Node, dtype: Node, origin: _Origin) -> Node:
    if dim.op == "tuple" and len(dim.args) == 1 and dim.args[0].op != "star":
        dim = dim.args[0]
    return Node(op, (tensor, dim, keepdim, dtype), None, origin)


def _size(tensor: Node, dim: Node, origin: _Origin) -> Node:
    return indexing.shape(tensor, origin) if dim == NONE else indexing.size(tensor, dim, origin)


def _narrow(tensor: Node, dim: Node, start: Node, length: Node, origin: _Origin) -> Node:
    stop = length if is_constant(start, 0) else arithmetic.binary("add", start, length)
    return indexing.sliced(tensor, dim, (start, stop, NONE), origin)


def _transpose(tensor: Node, first: Node, second: Node, origin: _Origin) -> Node:
    if type(first.value) is int and type(second.value) is int and first.value > second.value:
        first, second = second, first
    return Node("transpose", (tensor, first, second), None, origin)


def _where(condition: Node, met: Node, unmet: Node, origin: _Origin) -> Node:
    if met == unmet == Node("tuple"):
        return Node("nonzero", (condition, constant(value=True)), None, origin)
    return Node("where", (condition, met, unmet), None, origin)


# By the name of an operation in `torch_operations`.
_OF_OPERATIONS: dict[str, Callable[..., Node]] = {
    "add": partial(_scaled, "add"),
    "sub": partial(_scaled, "sub"),
    "mul": partial(arithmetic.binary, "mul"),
    "div": _div,
    "neg": arithmetic.negative,
    "pow": arithmetic.power,
    "reciprocal": lambda tensor, origin: arithmetic.binary("div", constant(1.0), tensor, origin),
    "mean": partial(_reduction, "mean"),
    "sum": partial(_reduction, "sum"),
    "size": _size,
    "narrow": _narrow,
    "transpose": _transpose,
    "t": lambda tensor, origin: Node("transpose", (tensor, constant(0), constant(1)), None, origin),
    "select": indexing.select,
    "where": _where,
    # Only the layout in memory changes.
    "contiguous": lambda tensor, memory_format, origin: tensor,
    **{op: partial(arithmetic.compare, op) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
}

_RENAMED = {
    "floor_divide": "floordiv",
    "remainder": "mod",
    "dim": "ndim",
    # `reshape` has the same values, and also works where `view` raises.
    "view": "reshape",
    "view_as": "reshape_as",
}

# By `Node.op`.
_OF_NODES: dict[str, Callable[..., Node]] = {
    **{op: partial(arithmetic.binary, op) for op in ("add", "sub", "mul", "div")},
    "neg": arithmetic.negative,
    "cast": arithmetic.cast,
    "branch": arithmetic.branch,
    "size": indexing.size,
    "shape": indexing.shape,
    "item": _item,
}
