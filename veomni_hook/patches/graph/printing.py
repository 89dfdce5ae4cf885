"""Nodes as source code for guards, and as short descriptions for messages."""

from __future__ import annotations

import ast

from veomni_hook.patches.graph.nodes import Node

__all__ = ["brief", "has_source", "source"]

_OPERATORS = {"is": " is ", "and": " and ", "or": " or ", "eq": " == ", "lt": " < ", "le": " <= "}
_SOURCE = {
    "argument": "{value}",
    "self": "{receiver}",
    "attribute": "{receiver}.{value}",
    "getattr": "{}.{value}",
    "index": "{}[{}]",
    "item": "{}[{}]",
    "device": "{}.device",
    "to_device": "{}.to({})",
    "not": "not ({})",
}
_LONGEST = 90
_DESCRIPTIONS = {
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
    """Code for ``node`` that is valid at the start of a function: ``self.variance_epsilon``.

    Raises:
        ValueError: the node contains more than names, attributes, literals, subscripts and tests of these.
    """
    if not has_source(node):
        raise ValueError(f"{brief(node)} is not code for the start of a function")
    if node.op == "constant":
        return repr(node.value) if node.value is not ... else "..."
    if node.op == "global" and node.origin is not None:
        return ast.unparse(node.origin)
    parts = [source(argument, receiver) for argument in node.args]
    if node.op in _OPERATORS:
        return _OPERATORS[node.op].join(f"({part})" if " " in part else part for part in parts)
    if node.op == "index":
        parts = [parts[0], ", ".join(parts[1:])]
    return _SOURCE[node.op].format(*parts, value=node.value, receiver=receiver)


def has_source(node: Node) -> bool:
    """Whether `source` has code for ``node``."""
    if node.op == "global":
        return node.origin is not None
    known = node.op in _SOURCE or node.op in _OPERATORS or node.op == "constant"
    return known and all(has_source(argument) for argument in node.args)


def brief(node: Node) -> str:
    """A short description of a node for a message."""
    text = _described(node, 3)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _described(node: Node, depth: int) -> str:
    if node.op == "global":
        return str(node.value).lstrip(":.")
    if node.op in ("argument", "constant", "attribute", "self"):
        return source(node)
    if depth == 0:
        return "…"
    parts = [_described(argument, depth - 1) for argument in node.args]
    template = _DESCRIPTIONS.get(node.op)
    if template is not None:
        return template.format(*parts)
    if node.op in ("tuple", "call"):
        called = parts.pop(0) if node.op == "call" else ""
        return f"{called}({', '.join(parts)})"
    return f"{node.op}({', '.join(parts)})"
