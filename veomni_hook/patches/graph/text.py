"""Nodes as text: code that computes a captured node, and short descriptions for messages."""

from __future__ import annotations

import ast

from veomni_hook.patches.graph.nodes import Node

__all__ = ["brief", "can_be_said", "source"]

_TESTS = {"is": " is ", "and": " and ", "or": " or ", "eq": " == ", "lt": " < ", "le": " <= "}
_FORMS = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "({} / {})",
    "floordiv": "({} // {})",
    "eq": "({} == {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "is": "({} is {})",
    "not": "not {}",
    "neg": "-{}",
    "cast": "{}.to({})",
    "dtype": "{}.dtype",
    "branch": "({1} if {0} else {2})",
}


def source(node: Node, receiver: str = "self") -> str:
    """Code for ``node`` at the start of a function: ``self.variance_epsilon``, ``ACT2FN[self.act]``.

    Raises:
        ValueError: it is more than names, attributes, literals and subscripts of such.
    """
    if node.op in ("argument", "self"):
        return receiver if node.op == "self" else str(node.value)
    if node.op == "attribute":
        return f"{receiver}.{node.value}"
    if node.op == "constant":
        return repr(node.value) if node.value is not ... else "..."
    if node.op == "global" and node.origin is not None:
        return ast.unparse(node.origin)
    if node.op in ("getattr", "index", "item"):
        value, *elements = (source(argument, receiver) for argument in node.args)
        return f"{value}.{node.value}" if node.op == "getattr" else f"{value}[{', '.join(elements)}]"
    if node.op == "to_device" and node.args[1].op == "device":
        value, place = source(node.args[0], receiver), source(node.args[1].args[0], receiver)
        return f"{value}.to({place}.device)"
    if node.op in _TESTS:
        return _TESTS[node.op].join(f"({source(argument, receiver)})" for argument in node.args)
    if node.op == "not":
        return f"not ({source(node.args[0], receiver)})"
    raise ValueError(f"{brief(node)} is not code for the start of a function")


def can_be_said(node: Node) -> bool:
    """Whether `source` has code for ``node``."""
    if node.op == "global":
        return node.origin is not None
    if node.op == "to_device":
        return node.args[1].op == "device" and can_be_said(node.args[0]) and can_be_said(node.args[1].args[0])
    if node.op in ("getattr", "index", "item", "not") or node.op in _TESTS:
        return all(can_be_said(argument) for argument in node.args)
    return node.op in ("argument", "self", "attribute", "constant")


def brief(node: Node, depth: int = 3) -> str:
    """A short description of a node for a message."""
    if node.op == "global":
        return str(node.value).lstrip(":.")
    if node.op in ("argument", "constant", "attribute", "self"):
        return source(node)
    if depth == 0:
        return "…"
    parts = [brief(argument, depth - 1) for argument in node.args]
    form = _FORMS.get(node.op)
    if form is not None:
        return form.format(*parts)
    if node.op in ("tuple", "call"):
        called = parts.pop(0) if node.op == "call" else ""
        return f"{called}({', '.join(parts)})"
    return f"{node.op}({', '.join(parts)})"
