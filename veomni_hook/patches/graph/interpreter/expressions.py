"""Expressions as nodes, given the values of names."""

from __future__ import annotations

import ast
from collections.abc import Callable

from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.graph import arithmetic, indexing
from veomni_hook.patches.graph.interpreter.calls import attribute, call
from veomni_hook.patches.graph.interpreter.state import Frame, UnclearError
from veomni_hook.patches.graph.nodes import Node, constant
from veomni_hook.patches.graph.torch_operations import DTYPES

__all__ = ["binary", "evaluate", "indices"]

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
_MOST_DEPTH = 150
# Values that are never None.
_NEVER_NONE = frozenset(
    "add sub mul div cast square rsqrt sqrt neg tuple shape size dtype slice unsqueeze cat stack "
    "mean silu".split()
)


def evaluate(node: ast.expr, frame: Frame) -> Node:
    """The value of an expression.

    Raises:
        UnclearError: it does something that no node expresses.
    """
    frame.trace.step(node)
    handler = _HANDLERS.get(type(node))
    value = _opaque(node, frame) if handler is None else handler(node, frame)
    if value.depth > _MOST_DEPTH:
        raise UnclearError("the function is nested too deeply to be followed", node)
    return value


def _constant(node: ast.Constant, frame: Frame) -> Node:
    return constant(node.value, node)


def _name(node: ast.Name, frame: Frame) -> Node:
    if node.id in frame.local:
        value = frame.values.get(node.id)
        if value is None or value.op == "unbound":
            raise UnclearError(f"{node.id} may not be bound here", node)
        return value
    if node.id in frame.values:
        return frame.values[node.id]
    path = frame.trace.scope.resolve(node.id)
    return Node("global", (), DTYPES.get(path, path), node)


def _attribute(node: ast.Attribute, frame: Frame) -> Node:
    return attribute(evaluate(node.value, frame), node, frame)


def _binary(node: ast.BinOp, frame: Frame) -> Node:
    left = evaluate(node.left, frame)
    right = evaluate(node.right, frame)
    return binary(node.op, left, right, node)


def binary(operator: ast.operator, left: Node, right: Node, origin: ast.expr | None) -> Node:
    """``left <operator> right``."""
    if isinstance(operator, ast.Pow):
        return arithmetic.power(left, right, origin)
    op = _BINARY[type(operator)]
    if op in ("add", "mul") and (_is_sequence(left) or _is_sequence(right)):
        return _joined(op, left, right, origin)
    if op in ("add", "sub", "mul", "div"):
        return arithmetic.binary(op, left, right, origin)
    return Node(op, (left, right), None, origin)


def _is_sequence(node: Node) -> bool:
    return node.op in ("tuple", "part", "shape") or (node.op == "constant" and isinstance(node.value, str))


def _joined(op: str, left: Node, right: Node, origin: ast.expr | None) -> Node:
    """Concatenated or repeated sequences: their order counts."""
    if op == "add" and left.op in ("tuple", "part", "shape") and right.op in ("tuple", "part", "shape"):
        parts = [side.args if side.op == "tuple" else (Node("star", (side,)),) for side in (left, right)]
        return Node("tuple", (*parts[0], *parts[1]), None, origin)
    return Node(f"sequence_{op}", (left, right), None, origin)


def _unary(node: ast.UnaryOp, frame: Frame) -> Node:
    operand = evaluate(node.operand, frame)
    if isinstance(node.op, ast.USub):
        return arithmetic.negative(operand, node)
    if isinstance(node.op, ast.Not):
        return operand.args[0] if operand.op == "not" else Node("not", (operand,), None, node)
    return Node("logical_invert" if isinstance(node.op, ast.Invert) else "plus", (operand,), None, node)


def _compare(node: ast.Compare, frame: Frame) -> Node:
    results = []
    left = evaluate(node.left, frame)
    for operator, comparator in zip(node.ops, node.comparators, strict=True):
        right = evaluate(comparator, frame)
        results.append(_comparison(operator, left, right, node))
        left = right
    return results[0] if len(results) == 1 else Node("and", tuple(results), None, node)


def _comparison(operator: ast.cmpop, left: Node, right: Node, origin: ast.expr) -> Node:
    op = _COMPARE[type(operator)]
    if op == "is" and right == indexing.NONE:
        if left.op in _NEVER_NONE or left.op == "constant":
            result = constant(left == indexing.NONE, origin)
        else:
            result = Node("is", (left, right), None, origin)
    else:
        result = arithmetic.compare(op, left, right, origin)
    if not isinstance(operator, ast.IsNot | ast.NotIn):
        return result
    if result.op == "constant":
        return constant(not result.value, origin)
    return Node("not", (result,), None, origin)


def _boolean(node: ast.BoolOp, frame: Frame) -> Node:
    operands: list[Node] = []
    decisive = isinstance(node.op, ast.Or)
    for value in node.values:
        operand = _conditional(value, frame) if operands else evaluate(value, frame)
        if operand.op == "constant":
            if bool(operand.value) is decisive:
                operands.append(operand)
                break
            if value is not node.values[-1]:
                continue
        operands.append(operand)
    if len(operands) == 1:
        return operands[0]
    return Node("or" if decisive else "and", tuple(operands), None, node)


def _choice(node: ast.IfExp, frame: Frame) -> Node:
    test = evaluate(node.test, frame)
    if test.op == "constant":
        return evaluate(node.body if test.value else node.orelse, frame)
    met, unmet = _conditional(node.body, frame), _conditional(node.orelse, frame)
    return arithmetic.branch(test, met, unmet, node)


def _conditional(node: ast.expr, frame: Frame) -> Node:
    """The value of an expression that runs only in some cases, so it must not change any value."""
    trace = frame.trace
    before = trace.changes, len(trace.effects)
    value = evaluate(node, frame)
    if before != (trace.changes, len(trace.effects)):
        raise UnclearError("an expression that runs only in some cases changes a value", node, writes=True)
    return value


def _tuple(node: ast.Tuple | ast.List, frame: Frame) -> Node:
    elements: list[Node] = []
    for element in node.elts:
        if isinstance(element, ast.Starred):
            value = evaluate(element.value, frame)
            elements.extend(value.args if value.op == "tuple" else (Node("star", (value,)),))
        else:
            elements.append(evaluate(element, frame))
    return Node("tuple", tuple(elements), None, node)


def _subscript(node: ast.Subscript, frame: Frame) -> Node:
    value = evaluate(node.value, frame)
    single = not isinstance(node.slice, ast.Tuple)
    return indexing.subscript(value, indices(node.slice, frame), single=single, origin=node)


def indices(node: ast.expr, frame: Frame) -> list[Node]:
    """The indices of a subscript, a slice as ``bounds``."""
    if isinstance(node, ast.Tuple):
        if any(isinstance(element, ast.Starred) for element in node.elts):
            raise UnclearError("a starred index", node)
        return [indices(element, frame)[0] for element in node.elts]
    if isinstance(node, ast.Slice):
        bounds = (node.lower, node.upper, node.step)
        return [Node("bounds", tuple(evaluate(b, frame) if b else indexing.NONE for b in bounds))]
    return [evaluate(node, frame)]


def _walrus(node: ast.NamedExpr, frame: Frame) -> Node:
    value = evaluate(node.value, frame)
    frame.values[node.target.id] = value
    frame.trace.changes += 1
    return value


def _opaque(node: ast.expr, frame: Frame) -> Node:
    """An expression kept as text (comprehension, lambda, f-string), with the values of its names."""
    names = set()
    for inner in walk_ast(node):
        if isinstance(inner, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            raise UnclearError(f"{type(inner).__name__} is not followed", node)
        if isinstance(inner, ast.Attribute) and inner.attr.endswith("_") and not inner.attr.endswith("__"):
            raise UnclearError("something is changed in place inside an expression", node, writes=True)
        if isinstance(inner, ast.Name) and (inner.id in frame.local or inner.id in frame.values):
            names.add(inner.id)
    values = [frame.values[name] for name in sorted(names) if name in frame.values]
    # It may call unknown code, so each occurrence is a different value.
    text = Node("opaque", (), ast.dump(node))
    return frame.trace.opaque((text, *values), (), node)


_Handler = Callable[[ast.expr, Frame], Node]
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
    ast.Call: call,  # type: ignore[dict-item]
}
