"""Rows of two kinds of features that are joined by boolean indices, in the order of their tokens.

The joined tensor has as many rows as a mask, a number that upstream reads from the device; it is also the
number of rows of both kinds, which the host knows. No kernel is asked for: `veomni_hook.multimodal.rows`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import free_name
from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import blocks, bound_once, calls_in, last_name, substituted, walk_ast
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status, formula_slot

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "row_join"
WORDS = "zeros( .sum()"
CANDIDATES = (
    "every method and function that assigns elements of a tensor which new_zeros or zeros made with the sum"
    " of something as a size"
)

_IMPORT = ("veomni_hook.multimodal", "rows as veomni_rows")
_VARIANT = "in_order_of_tokens"
_SLOT = formula_slot("row_merge", "rows")
#: What is added may be joined or moved first.
JOIN = Template(
    """
AT = MASK[VISUAL]
OTHER_AT = OTHER_MASK[VISUAL]
for ROW, OTHER in zip(FEATURES, OTHER_FEATURES):
    while some:
        ROW = torch.cat(ROW, dim=0)
        OTHER = torch.cat(OTHER, dim=0)
    if either:
        JOINT = ROW.new_zeros(VISUAL.sum(), ROW.shape[-1])
    else:
        JOINT = ROW.new_zeros(VISUAL.sum(), ROW.shape[-1]).to(ROW.device)
    JOINT[AT, :] = ROW
    JOINT[OTHER_AT, :] = OTHER
    if either:
        LIST.append(JOINT)
    else:
        SUM = SUM + (JOINT,)
...
""",
    names="MASK OTHER_MASK VISUAL FEATURES OTHER_FEATURES LIST",
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, _, function in view.every_function():
        if "zeros(" not in view.text(function) or (line := _joined(function)) is None:
            continue
        join = JOIN.find(blocks(function))
        edits = guarded(view, function, join) if isinstance(join, Found) else None
        if edits is None:
            reason = Reason("the number of joined rows is read from the device", Code.READS_VALUES, line)
            yield Site(OP, target, Status.MISSED, reason=reason, lineno=line)
        else:
            routed = Site(OP, target, Status.ROUTED, _VARIANT, lineno=line, imports=(_IMPORT,))
            yield replace(routed, edits=edits, slots=(_SLOT,))


def guarded(view: ModuleView, function: FunctionNode, join: Found) -> tuple[Edit, ...] | None:
    """The edits that extend the list by joined features, if the device can check their numbers."""
    name = free_name(function, "joined")
    kinds = f"({join['MASK']}, {join['FEATURES']}), ({join['OTHER_MASK']}, {join['OTHER_FEATURES']})"
    kept, longer = join["LIST"], join["SUM"]
    keeping = f"{kept}.extend({name})" if kept else f"{longer} = {longer} + tuple({name})"
    return guard(
        view,
        Run(function, [*join.block], join.index, join.index + 2),
        _SLOT.name,
        [],
        ast.parse(keeping).body,
        f"{OP}/{_VARIANT}: no number of rows is read",
        tests=[f"({name} := veomni_rows.joined({join['VISUAL']}, {kinds})) is not None"],
        returns=False,
    )


def _joined(function: FunctionNode) -> int | None:
    """The first line that makes such a tensor whose elements are assigned."""
    line_of: dict[str, int] = {}
    assigned: set[str] = set()
    values = bound_once(walk_ast(function))
    for node in walk_ast(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and _sized_by_sum(substituted(node.value, values)):
                line_of.setdefault(target.id, node.lineno)
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                assigned.add(target.value.id)
    return min((line for name, line in line_of.items() if name in assigned), default=None)


def _sized_by_sum(value: ast.expr) -> bool:
    calls = (call for call in calls_in(value) if last_name(call.func) in ("new_zeros", "zeros"))
    sizes = (size for call in calls for size in call.args)
    return any(isinstance(size, ast.Call) and last_name(size.func) == "sum" for size in sizes)
