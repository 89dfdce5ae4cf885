"""Rows of two sources that are joined by boolean indices: none is routed.

The joined tensor has as many rows as a mask, a number that upstream reads from the device to allocate it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.expressions import last_name
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.idioms.row_merge.find import OP
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "PART", "find"]

PART = "join"
CANDIDATES = (
    "every method and function that assigns elements of a tensor which new_zeros or zeros made with the sum"
    " of something as a size (part join)"
)

_REASON = "the number of joined rows is read from the device"


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    if "zeros(" not in view.document.source or ".sum()" not in view.document.source:
        return
    targets = [
        (f"{owner.name}.{name}", method)
        for owner in view.classes.values()
        for name, method in view.methods(owner).items()
    ]
    for target, function in [*targets, *view.functions.items()]:
        if (line := _joined(function)) is not None:
            yield Site(OP, target, Status.MISSED, reason=f"{_REASON} (line {line})", part=PART, lineno=line)


def _joined(function: FunctionNode) -> int | None:
    """The first line that makes such a tensor whose elements are assigned."""
    made: dict[str, int] = {}
    assigned: set[str] = set()
    for node in walk_ast(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and _sized_by_sum(node.value):
                made.setdefault(target.id, node.lineno)
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                assigned.add(target.value.id)
    return min((line for name, line in made.items() if name in assigned), default=None)


def _sized_by_sum(value: ast.expr) -> bool:
    calls = [node for node in walk_ast(value) if isinstance(node, ast.Call)]
    return any(
        last_name(call.func) in ("new_zeros", "zeros") and any(map(_is_sum, call.args)) for call in calls
    )


def _is_sum(size: ast.expr) -> bool:
    return isinstance(size, ast.Call) and last_name(size.func) == "sum"
