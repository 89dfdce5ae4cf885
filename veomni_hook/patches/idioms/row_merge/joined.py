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
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.expressions import last_name
from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.code.statements import blocks
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.routes.insertion import free_name
from veomni_hook.patches.routes.takeover import guard
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "row_join"
CANDIDATES = (
    "every method and function that assigns elements of a tensor which new_zeros or zeros made with the sum"
    " of something as a size"
)

_IMPORT = ("veomni_hook.multimodal", "rows as veomni_rows")
_VARIANT = "in_order_of_tokens"
_REASON = "the number of joined rows is read from the device"


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
    targets = [
        (f"{owner.name}.{name}", method)
        for owner in view.classes.values()
        for name, method in view.methods(owner).items()
    ]
    for target, function in [*targets, *view.functions.items()]:
        if (line := _joined(function)) is not None:
            site = Site(OP, target, Status.MISSED, reason=f"{_REASON} (line {line})", lineno=line)
            edits = next((guarded(view, join) for join in _joins(function)), None)
            yield (
                site
                if edits is None
                else replace(
                    site, status=Status.ROUTED, variant=_VARIANT, reason="", edits=edits, imports=(_IMPORT,)
                )
            )


def guarded(view: ModuleView, join: _Join) -> tuple[Edit, ...] | None:
    """The edits that extend the list by joined features, if the device can check their numbers."""
    name = free_name(join.run.function, "joined")
    kinds = ", ".join(f"({mask}, {features})" for mask, features in join.kinds)
    return guard(
        view,
        join.run,
        f"({name} := veomni_rows.joined({join.visual}, {kinds})) is not None",
        ast.parse(join.kept.format(name)).body,
        f"{OP}/{_VARIANT}: no number of rows is read",
        returns=False,
    )


def _joins(function: FunctionNode) -> Iterator[_Join]:
    for block in blocks(function):
        for index in range(len(block) - 2):
            if (found := _join(Run(function, block, index, index + 2))) is not None:
                yield found


def _join(run: Run) -> _Join | None:
    """The parts of a run of three statements in the form above; None if it has another one."""
    first, second, loop = run.statements
    one, other = _selected(first), _selected(second)
    if one is None or other is None or one[2] != other[2] or not isinstance(loop, ast.For):
        return None
    match loop:
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(row), ast.Name(other_row)]),
            iter=ast.Call(
                func=ast.Name("zip"), args=[ast.Name(features), ast.Name(other_features)], keywords=[]
            ),
            orelse=[],
        ):
            kept = _kept(loop.body, (row, other_row), (one[0], other[0]), one[2])
            if kept:
                return _Join(run, one[2], ((one[1], features), (other[1], other_features)), kept)
    return None


def _selected(statement: ast.stmt) -> tuple[str, str, str] | None:
    """The names in ``selected = mask[visual]``."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(name)], value=ast.Subscript(value=ast.Name(mask), slice=ast.Name(visual))
        ):
            return name, mask, visual
    return None


def _kept(body: list[ast.stmt], rows: tuple[str, str], selected: tuple[str, str], visual: str) -> str:
    """The statement that keeps all joined features, ``{}``; empty if the loop's body has another form."""
    *start, made, first, second, last = body if len(body) >= 4 else [ast.Pass()] * 4
    whole = {f"{row} = torch.cat({row}, dim=0)" for row in rows}
    if not {ast.unparse(each) for each in start} <= whole:
        return ""
    if not isinstance(made, ast.Assign) or not isinstance(made.targets[0], ast.Name):
        return ""
    joint = made.targets[0].id
    zeros = f"{rows[0]}.new_zeros({visual}.sum(), {rows[0]}.shape[-1])"
    assigned = [f"{joint}[{at}, :] = {row}" for at, row in zip(selected, rows, strict=True)]
    same = [ast.unparse(first), ast.unparse(second)] == assigned
    if not same or ast.unparse(made.value) not in (zeros, f"{zeros}.to({rows[0]}.device)"):
        return ""
    match last:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(kept), attr="append"))):
            return f"{kept}.extend({{}})" if ast.unparse(last) == f"{kept}.append({joint})" else ""
        case ast.Assign(targets=[ast.Name(kept)]):
            longer = f"{kept} = {kept} + ({joint},)"
            return f"{kept} = {kept} + tuple({{}})" if ast.unparse(last) == longer else ""
    return ""


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
