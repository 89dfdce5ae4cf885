"""Rows of two kinds of features that are joined by boolean indices, in the order of their tokens.

    first_joint = first_mask[visual]
    second_joint = second_mask[visual]
    for one, other in zip(first_features, second_features):
        joint = one.new_zeros(visual.sum(), one.shape[-1])
        joint[first_joint, :] = one
        joint[second_joint, :] = other
        features.append(joint)  # or: features = features + (joint,)

The joined tensor has as many rows as a mask, a number that upstream reads from the device; it is also the
number of rows of both kinds, which the host knows. No kernel is asked for: `veomni_hook.multimodal.rows`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.expressions import last_name
from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.code.statements import blocks, bound_once
from veomni_hook.patches.code.substitution import substituted
from veomni_hook.patches.code.walk import calls_in, walk_ast
from veomni_hook.patches.routes.insertion import free_name
from veomni_hook.patches.routes.takeover import guard
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status
from veomni_hook.patches.slots import formula_slot

__all__ = ["CANDIDATES", "OP", "find"]

OP = "row_join"
CANDIDATES = (
    "every method and function that assigns elements of a tensor which new_zeros or zeros made with the sum"
    " of something as a size"
)

_IMPORT = ("veomni_hook.multimodal", "rows as veomni_rows")
_VARIANT = "in_order_of_tokens"
_SLOT = formula_slot("row_merge", "rows")
_REASON = "the number of joined rows is read from the device"
#: The form above, where what is added may be joined or moved first.
_FORM = re.compile(
    r"(?P<at>\w+) = (?P<mask>\w+)\[(?P<visual>\w+)\]\n"
    r"(?P<other_at>\w+) = (?P<other_mask>\w+)\[(?P=visual)\]\n"
    r"for (?P<row>\w+), (?P<other>\w+) in zip\((?P<features>\w+), (?P<other_features>\w+)\):\n"
    r"(    ((?P=row) = torch\.cat\((?P=row)|(?P=other) = torch\.cat\((?P=other)), dim=0\)\n)*"
    r"    (?P<joint>\w+) = (?P=row)\.new_zeros\((?P=visual)\.sum\(\), (?P=row)\.shape\[-1\]\)"
    r"(\.to\((?P=row)\.device\))?\n"
    r"    (?P=joint)\[(?P=at), :\] = (?P=row)\n"
    r"    (?P=joint)\[(?P=other_at), :\] = (?P=other)\n"
    r"    ((?P<list>\w+)\.append\((?P=joint)\)|(?P<sum>\w+) = (?P=sum) \+ \((?P=joint),\))"
)


class _Join(NamedTuple):
    """The statements, the names that they read, and the statement that keeps what was joined."""

    run: Run
    visual: str
    kinds: tuple[tuple[str, str], ...]
    kept: str


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    if "zeros(" not in view.document.source or ".sum()" not in view.document.source:
        return
    for target, _, function in view.every_function():
        if "zeros(" not in view.text(function) or (line := _joined(function)) is None:
            continue
        edits = next((guarded(view, join) for join in _joins(function)), None)
        if edits is None:
            yield Site(OP, target, Status.MISSED, reason=f"{_REASON} (line {line})", lineno=line)
        else:
            routed = Site(OP, target, Status.ROUTED, _VARIANT, lineno=line, imports=(_IMPORT,))
            yield replace(routed, edits=edits, slots=(_SLOT,))


def guarded(view: ModuleView, join: _Join) -> tuple[Edit, ...] | None:
    """The edits that extend the list by joined features, if the device can check their numbers."""
    name = free_name(join.run.function, "joined")
    kinds = ", ".join(f"({mask}, {features})" for mask, features in join.kinds)
    return guard(
        view,
        join.run,
        _SLOT.name,
        [],
        ast.parse(join.kept.format(name)).body,
        f"{OP}/{_VARIANT}: no number of rows is read",
        tests=[f"({name} := veomni_rows.joined({join.visual}, {kinds})) is not None"],
        returns=False,
    )


def _joins(function: FunctionNode) -> Iterator[_Join]:
    for block in blocks(function):
        for index in range(len(block) - 2):
            run = Run(function, block, index, index + 2)
            if isinstance(block[index + 2], ast.For) and (found := _join(run)) is not None:
                yield found


def _join(run: Run) -> _Join | None:
    """The parts of a run of three statements in the form above; None if it has another one."""
    found = _FORM.fullmatch("\n".join(map(ast.unparse, run.statements)))
    if found is None:
        return None
    kinds = (found["mask"], found["features"]), (found["other_mask"], found["other_features"])
    kept, longer = found["list"], found["sum"]
    keeping = f"{kept}.extend({{}})" if kept else f"{longer} = {longer} + tuple({{}})"
    return _Join(run, found["visual"], kinds, keeping)


def _joined(function: FunctionNode) -> int | None:
    """The first line that makes such a tensor whose elements are assigned."""
    made: dict[str, int] = {}
    assigned: set[str] = set()
    values = bound_once(walk_ast(function))
    for node in walk_ast(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and _sized_by_sum(substituted(node.value, values)):
                made.setdefault(target.id, node.lineno)
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                assigned.add(target.value.id)
    return min((line for name, line in made.items() if name in assigned), default=None)


def _sized_by_sum(value: ast.expr) -> bool:
    made = (call for call in calls_in(value) if last_name(call.func) in ("new_zeros", "zeros"))
    sizes = (size for call in made for size in call.args)
    return any(isinstance(size, ast.Call) and last_name(size.func) == "sum" for size in sizes)
