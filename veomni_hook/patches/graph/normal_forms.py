"""Normal forms of known operations, made from the operands in the order of the parameters."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from veomni_hook.patches.graph import arithmetic as sums
from veomni_hook.patches.graph import indexing
from veomni_hook.patches.graph.indexing import NONE
from veomni_hook.patches.graph.nodes import Node, constant, is_constant

__all__ = ["normal", "renewed"]

_Origin = ast.expr | None
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


def normal(op: str, args: Sequence[Node], origin: ast.expr | None = None) -> Node:
    """The normal form of an operation with all its operands."""
    maker = _MAKERS.get(op)
    if maker is not None:
        return maker(tuple(args), origin)
    if op in _COMPARISONS:
        return sums.compare(op, args[0], args[1], origin)
    return Node(op, tuple(args), None, origin)


def renewed(node: Node) -> Node:
    """The normal form of a node whose operands have changed."""
    maker = _RENEWERS.get(node.op)
    if maker is None or node.value is not None:
        return node
    return maker(node.args, node.origin)


def _item(args: tuple[Node, ...], origin: _Origin) -> Node:
    number = args[1].value
    return indexing.item(args[0], number, origin) if type(number) is int else Node("item", args, None, origin)


def _scaled(op: str) -> Callable[[tuple[Node, ...], _Origin], Node]:
    def make(args: tuple[Node, ...], origin: _Origin) -> Node:
        left, right, alpha = args
        if is_constant(alpha, 1):
            return sums.arithmetic(op, left, right, origin)
        return Node(f"{op}_scaled", args, None, origin)

    return make


def _div(args: tuple[Node, ...], origin: _Origin) -> Node:
    left, right, rounding = args
    if rounding == NONE:
        return sums.arithmetic("div", left, right, origin)
    if rounding == constant("floor"):
        return Node("floordiv", (left, right), None, origin)
    return Node("div_rounded", args, None, origin)


def _reduction(args: tuple[Node, ...], origin: _Origin, op: str) -> Node:
    tensor, dim, keep, *dtype = args
    if dim.op == "tuple" and len(dim.args) == 1 and dim.args[0].op != "star":
        dim = dim.args[0]
    return Node(op, (tensor, dim, keep, *dtype), None, origin)


def _size(args: tuple[Node, ...], origin: _Origin) -> Node:
    tensor, dim = args
    return indexing.shape(tensor, origin) if dim == NONE else indexing.size(tensor, dim, origin)


def _narrow(args: tuple[Node, ...], origin: _Origin) -> Node:
    tensor, dim, start, count = args
    stop = count if is_constant(start, 0) else sums.arithmetic("add", start, count)
    return indexing.sliced(tensor, dim, (start, stop, NONE), origin)


def _transpose(args: tuple[Node, ...], origin: _Origin) -> Node:
    tensor, first, second = args
    if type(first.value) is int and type(second.value) is int and first.value > second.value:
        first, second = second, first
    return Node("transpose", (tensor, first, second), None, origin)


def _where(args: tuple[Node, ...], origin: _Origin) -> Node:
    if args[1] == args[2] == Node("tuple"):
        return Node("nonzero", (args[0], constant(value=True)), None, origin)
    return Node("where", args, None, origin)


def _silu(args: tuple[Node, ...], origin: _Origin) -> Node:
    return Node("silu", args[:1], None, origin)


_MAKERS: dict[str, Callable[[tuple[Node, ...], _Origin], Node]] = {
    "add": _scaled("add"),
    "sub": _scaled("sub"),
    "mul": lambda args, origin: sums.arithmetic("mul", args[0], args[1], origin),
    "div": _div,
    "floor_divide": lambda args, origin: Node("floordiv", args, None, origin),
    "remainder": lambda args, origin: Node("mod", args, None, origin),
    "neg": lambda args, origin: sums.negative(args[0], origin),
    "pow": lambda args, origin: sums.power(args[0], args[1], origin),
    "reciprocal": lambda args, origin: sums.arithmetic("div", constant(1.0), args[0], origin),
    "mean": lambda args, origin: _reduction(args, origin, "mean"),
    "sum": lambda args, origin: _reduction(args, origin, "sum"),
    "size": _size,
    "dim": lambda args, origin: Node("ndim", args, None, origin),
    "narrow": _narrow,
    "transpose": _transpose,
    "t": lambda args, origin: Node("transpose", (args[0], constant(0), constant(1)), None, origin),
    "select": lambda args, origin: indexing.select(args[0], args[1], args[2], origin),
    "where": _where,
    "silu": _silu,
    # `reshape` has the same values, and also works where `view` raises.
    "view": lambda args, origin: Node("reshape", args, None, origin),
    # Only the layout in memory changes.
    "contiguous": lambda args, origin: args[0],
    "view_as": lambda args, origin: Node("reshape_as", args, None, origin),
}

_RENEWERS: dict[str, Callable[[tuple[Node, ...], _Origin], Node]] = {
    "add": lambda args, origin: sums.arithmetic("add", args[0], args[1], origin),
    "sub": lambda args, origin: sums.arithmetic("sub", args[0], args[1], origin),
    "mul": lambda args, origin: sums.arithmetic("mul", args[0], args[1], origin),
    "div": lambda args, origin: sums.arithmetic("div", args[0], args[1], origin),
    "neg": lambda args, origin: sums.negative(args[0], origin),
    "cast": lambda args, origin: sums.cast(args[0], args[1], origin),
    "branch": lambda args, origin: sums.branch(args[0], args[1], args[2], origin),
    "size": lambda args, origin: indexing.size(args[0], args[1], origin),
    "shape": lambda args, origin: indexing.shape(args[0], origin),
    "item": _item,
}
