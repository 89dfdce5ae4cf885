"""Copies of syntax trees in which other code stands for some of the nodes."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from veomni_hook.patches.code.walk import walk_ast

__all__ = ["substituted", "swapped"]


def swapped(value: Any, swaps: Mapping[int, Sequence[ast.AST]]) -> Any:
    """A copy of a tree (or of a field's value) with some nodes replaced.

    Args:
        swaps: ``id`` of a node to its replacement; in a list it may be several nodes or none.
    """
    if isinstance(value, list):
        return [new for item in value for new in (swaps.get(id(item)) or _kept(item, swaps))]
    if not isinstance(value, ast.AST):
        return value
    if id(value) in swaps:
        return swaps[id(value)][0]
    return type(value)(**{name: swapped(getattr(value, name, None), swaps) for name in value._fields})


def _kept(item: Any, swaps: Mapping[int, Sequence[ast.AST]]) -> Sequence[Any]:
    # An empty capture removes its place.
    return () if id(item) in swaps else (swapped(item, swaps),)


def substituted(node: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    """``node`` with names that it reads replaced by expressions; itself if there is nothing to replace."""
    names = (inner for inner in walk_ast(node) if isinstance(inner, ast.Name) and inner.id in values)
    swaps = {id(name): (values[name.id],) for name in names if isinstance(name.ctx, ast.Load)}
    result: ast.expr = swapped(node, swaps) if swaps else node
    return result
