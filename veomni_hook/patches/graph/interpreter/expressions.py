"""Convert expressions to nodes, given the values of names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from veomni_hook.patches.graph import arithmetic, indexing
from veomni_hook.patches.graph.interpreter.calls import attribute, call
from veomni_hook.patches.graph.nodes import Node, constant
from veomni_hook.patches.graph.torch_operations import DTYPES
from veomni_hook.patches.graph.interpreter.state import Frame, Trace, UnclearError
from veomni_hook.patches.text.walk import walk_ast

__all__ = ["evaluate", "unpacked"]

_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.MatMult: "matmul",
    ast.BitAnd: "bitand",
    ast.BitOr: "bitor",
    ast.BitXor: "bitxor",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
}
_COMPARE = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Is: "is",
    ast.IsNot: "is",
    ast.In: "in",
    ast.NotIn: "in",
}
# Twice the depth found in practice; several functions recurse from a node to its leaves.
_DEPTH = 150
# Values that are never None.
_PRESENT = frozenset(
    "add sub mul div cast square rsqrt sqrt neg tuple shape size dtype slice unsqueeze cat stack "
    "mean silu".split()
)


def evaluate(node: ast.expr, frame: Frame, trace: Trace) -> Node:
    """The value of an expression.

    Raises:
        UnclearError: it does something that no node expresses.
    """
    trace.step(node)
    handler = _HANDLERS.get(type(node))
    made = _opaque(node, frame, trace) if handler is None else handler(node, frame, trace)
    if made.depth > _DEPTH:
        raise UnclearError("the function is nested too deeply to be followed", node)
    return made


def unpacked(value: Node, targets: Sequence[ast.expr]) -> list[Node]:
    """The value that each of several targets gets when a sequence is unpacked."""
    starred = [number for number, target in enumerate(targets) if isinstance(target, ast.Starred)]
    known = indexing.length(value)
    if not starred:
        if known is not None and known != len(targets):
            raise UnclearError(f"{known} values for {len(targets)} names", targets[0])
        return [indexing.item(value, number) for number in range(len(targets))]
    (star,) = starred
    after = star + 1 - len(targets)
    bounds = Node("bounds", (constant(star or None), constant(after or None), constant(None)))
    rest = indexing.subscript(value, [bounds], single=True)
    numbers = [number if number < star else number - len(targets) for number in range(len(targets))]
    return [
        rest if number == star else indexing.item(value, numbers[number]) for number in range(len(targets))
    ]


def _constant(node: ast.Constant, frame: Frame, trace: Trace) -> Node:
    return constant(node.value, node)


def _name(node: ast.Name, frame: Frame, trace: Trace) -> Node:
    if node.id in frame.local:
        value = frame.values.get(node.id)
        if value is None or value.op == "unbound":
            raise UnclearError(f"{node.id} may not be bound here", node)
        return value
    if node.id in frame.values:
        return frame.values[node.id]
    path = trace.scope.resolve(node.id)
    return Node("global", (), DTYPES.get(path, path), node)


def _attribute(node: ast.Attribute, frame: Frame, trace: Trace) -> Node:
    return attribute(evaluate(node.value, frame, trace), node, frame)


def _binary(node: ast.BinOp, frame: Frame, trace: Trace) -> Node:
    left = evaluate(node.left, frame, trace)
    right = evaluate(node.right, frame, trace)
    return binary(node.op, left, right, node)


def binary(operator: ast.operator, left: Node, right: Node, origin: ast.expr | None) -> Node:
    """``left <operator> right``."""
    if isinstance(operator, ast.Pow):
        return arithmetic.power(left, right, origin)
    op = _BINARY[type(operator)]
    if op in ("add", "mul") and (_is_sequence(left) or _is_sequence(right)):
        return _joined(op, left, right, origin)
    if op in ("add", "sub", "mul", "div"):
        return arithmetic.arithmetic(op, left, right, origin)
    return Node(op, (left, right), None, origin)


def _is_sequence(node: Node) -> bool:
    return node.op in ("tuple", "part", "shape") or (node.op == "constant" and isinstance(node.value, str))


def _joined(op: str, left: Node, right: Node, origin: ast.expr | None) -> Node:
    """Concatenated or repeated sequences: their order counts."""
    if op == "add" and left.op in ("tuple", "part", "shape") and right.op in ("tuple", "part", "shape"):
        parts = [side.args if side.op == "tuple" else (Node("star", (side,)),) for side in (left, right)]
        return Node("tuple", (*parts[0], *parts[1]), None, origin)
    return Node(f"sequence_{op}", (left, right), None, origin)


def _unary(node: ast.UnaryOp, frame: Frame, trace: Trace) -> Node:
    operand = evaluate(node.operand, frame, trace)
    if isinstance(node.op, ast.USub):
        return arithmetic.negative(operand, node)
    if isinstance(node.op, ast.Not):
        return operand.args[0] if operand.op == "not" else Node("not", (operand,), None, node)
    return Node("logical_invert" if isinstance(node.op, ast.Invert) else "plus", (operand,), None, node)


def _compare(node: ast.Compare, frame: Frame, trace: Trace) -> Node:
    found = []
    left = evaluate(node.left, frame, trace)
    for operator, comparator in zip(node.ops, node.comparators, strict=True):
        right = evaluate(comparator, frame, trace)
        found.append(_comparison(operator, left, right, node))
        left = right
    return found[0] if len(found) == 1 else Node("and", tuple(found), None, node)


def _comparison(operator: ast.cmpop, left: Node, right: Node, origin: ast.expr) -> Node:
    op = _COMPARE[type(operator)]
    if op == "is" and right == indexing.NONE:
        if left.op in _PRESENT or left.op == "constant":
            made = constant(left == indexing.NONE, origin)
        else:
            made = Node("is", (left, right), None, origin)
    else:
        made = arithmetic.compare(op, left, right, origin)
    if isinstance(operator, ast.IsNot | ast.NotIn):
        return (
            constant(not made.value, origin) if made.op == "constant" else Node("not", (made,), None, origin)
        )
    return made


def _boolean(node: ast.BoolOp, frame: Frame, trace: Trace) -> Node:
    operands: list[Node] = []
    decisive = isinstance(node.op, ast.Or)
    for value in node.values:
        found = _perhaps(value, frame, trace) if operands else evaluate(value, frame, trace)
        if found.op == "constant":
            if bool(found.value) is decisive:
                operands.append(found)
                break
            if value is not node.values[-1]:
                continue
        operands.append(found)
    if len(operands) == 1:
        return operands[0]
    return Node("or" if decisive else "and", tuple(operands), None, node)


def _choice(node: ast.IfExp, frame: Frame, trace: Trace) -> Node:
    test = evaluate(node.test, frame, trace)
    if test.op == "constant":
        return evaluate(node.body if test.value else node.orelse, frame, trace)
    return arithmetic.branch(
        test, _perhaps(node.body, frame, trace), _perhaps(node.orelse, frame, trace), node
    )


def _perhaps(node: ast.expr, frame: Frame, trace: Trace) -> Node:
    """The value of an expression that runs only in some cases, so it must not change any value."""
    before = trace.changes, len(trace.effects)
    value = evaluate(node, frame, trace)
    if before != (trace.changes, len(trace.effects)):
        raise UnclearError("an expression that runs only in some cases changes a value", node, writes=True)
    return value


def _tuple(node: ast.Tuple | ast.List, frame: Frame, trace: Trace) -> Node:
    elements: list[Node] = []
    for element in node.elts:
        if isinstance(element, ast.Starred):
            value = evaluate(element.value, frame, trace)
            elements.extend(value.args if value.op == "tuple" else (Node("star", (value,)),))
        else:
            elements.append(evaluate(element, frame, trace))
    return Node("tuple", tuple(elements), None, node)


def _subscript(node: ast.Subscript, frame: Frame, trace: Trace) -> Node:
    value = evaluate(node.value, frame, trace)
    return indexing.subscript(
        value, indices(node.slice, frame, trace), single=not isinstance(node.slice, ast.Tuple), origin=node
    )


def indices(node: ast.expr, frame: Frame, trace: Trace) -> list[Node]:
    """The indices of a subscript, a slice as ``bounds``."""
    if isinstance(node, ast.Tuple):
        if any(isinstance(element, ast.Starred) for element in node.elts):
            raise UnclearError("a starred index", node)
        return [indices(element, frame, trace)[0] for element in node.elts]
    if isinstance(node, ast.Slice):
        bounds = (node.lower, node.upper, node.step)
        return [Node("bounds", tuple(evaluate(b, frame, trace) if b else indexing.NONE for b in bounds))]
    return [evaluate(node, frame, trace)]


def _walrus(node: ast.NamedExpr, frame: Frame, trace: Trace) -> Node:
    value = evaluate(node.value, frame, trace)
    frame.values[node.target.id] = value
    trace.changes += 1
    return value


def _call(node: ast.Call, frame: Frame, trace: Trace) -> Node:
    return call(node, frame, trace, evaluate)


def _opaque(node: ast.expr, frame: Frame, trace: Trace) -> Node:
    """An expression kept as text (comprehension, lambda, f-string), with the values of its names."""
    names = set()
    for inner in walk_ast(node):
        if isinstance(inner, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            raise UnclearError(f"{type(inner).__name__} is not followed", node)
        if isinstance(inner, ast.Attribute) and inner.attr.endswith("_") and not inner.attr.endswith("__"):
            raise UnclearError("something is changed in place inside an expression", node, writes=True)
        if isinstance(inner, ast.Name) and (inner.id in frame.local or inner.id in frame.values):
            names.add(inner.id)
    held = [frame.values[name] for name in sorted(names) if name in frame.values]
    # It may call unknown code, so each occurrence is a different value.
    named = Node("opaque", (), ast.dump(node))
    return trace.opaque(Node("call", (named, *held), None, node), ())


_Handler = Callable[[ast.expr, Frame, Trace], Node]
_HANDLERS: dict[type[ast.expr], _Handler] = {
    ast.Constant: _constant,  # type: ignore[dict-item]
    ast.Name: _name,  # type: ignore[dict-item]
    ast.Attribute: _attribute,  # type: ignore[dict-item]
    ast.BinOp: _binary,  # type: ignore[dict-item]
    ast.UnaryOp: _unary,  # type: ignore[dict-item]
    ast.Compare: _compare,  # type: ignore[dict-item]
    ast.BoolOp: _boolean,  # type: ignore[dict-item]
    ast.IfExp: _choice,  # type: ignore[dict-item]
    ast.Tuple: _tuple,  # type: ignore[dict-item]
    ast.List: _tuple,  # type: ignore[dict-item]
    ast.Subscript: _subscript,  # type: ignore[dict-item]
    ast.NamedExpr: _walrus,  # type: ignore[dict-item]
    ast.Call: _call,  # type: ignore[dict-item]
}
