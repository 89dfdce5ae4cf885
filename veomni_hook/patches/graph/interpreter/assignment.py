"""Assign a value to a target: a name, several targets, a subscript or an attribute."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from veomni_hook.patches.graph import indexing
from veomni_hook.patches.graph.interpreter.expressions import evaluate, indices
from veomni_hook.patches.graph.interpreter.memory import write
from veomni_hook.patches.graph.interpreter.state import Frame, UnclearError
from veomni_hook.patches.graph.nodes import Node, constant

__all__ = ["assign"]


def assign(target: ast.expr, value: Node, frame: Frame) -> None:
    """Store a value in ``frame``, or record an effect.

    Raises:
        UnclearError: other code may see the change.
    """
    if isinstance(target, ast.Name):
        if target.id not in frame.local:
            raise UnclearError(f"{target.id} is not local", target)
        frame.values[target.id] = value
    elif isinstance(target, ast.Starred):
        assign(target.value, value, frame)
    elif isinstance(target, ast.Tuple | ast.List):
        for inner, part in zip(target.elts, _unpacked(value, target.elts), strict=True):
            assign(inner, part, frame)
    elif isinstance(target, ast.Subscript):
        old = evaluate(target.value, frame)
        new = Node("setitem", (old, Node("tuple", tuple(indices(target.slice, frame))), value))
        write(target.value, old, new, frame)
    elif isinstance(target, ast.Attribute):
        owner = evaluate(target.value, frame)
        frame.trace.effects.append(Node("setattr", (owner, value), target.attr))
        if owner.op != "self":
            raise UnclearError("an attribute of another object is set", target)
        frame.values[f"self.{target.attr}"] = value


def _unpacked(value: Node, targets: Sequence[ast.expr]) -> list[Node]:
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
    parts = [indexing.item(value, n if n < star else n - len(targets)) for n in range(len(targets))]
    parts[star] = indexing.subscript(value, [bounds], single=True)
    return parts
