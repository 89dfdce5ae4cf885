"""Features of images that are added between the layers (deepstack), at the rows of a mask.

The method that `FORMS` call does nothing but add the rows. Then what it adds to zeros, at all positions, can
be made before the loop and sliced like the hidden states.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_names, parameter_names
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import calls_in, own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.modules import method_of
from veomni_hook.patches.idioms.row_merge.added import operands_of
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed

__all__ = ["Addition", "addition_in"]

FORMS = tuple(
    Template(
        f"""
if ROWS is not None and {within}:
    HIDDEN = self.ADD(HIDDEN, MASK, ROWS[INDEX])
""",
        names="ROWS INDEX MASK",
    )
    for within in ("INDEX in range(len(ROWS))", "INDEX < len(ROWS)")
)


@dataclass(frozen=True)
class Addition:
    """A statement of a loop that adds rows.

    Attributes:
        statement: the condition around it.
        call: the call of the method.
        method: the name of the method of ``self``.
        mask: the name of the mask.
        rows: the name of what holds the rows of each layer.
        target: the method, as patches name it.
    """

    statement: ast.stmt
    call: ast.Call
    method: str
    mask: str
    rows: str
    target: str


def addition_in(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, loop: ast.For, hidden: str
) -> Addition | None:
    """The only statement of a loop that adds rows, if nothing else of the forward uses mask and rows."""
    matches = [
        match
        for statement in loop.body
        for form in FORMS
        if isinstance(match := form.find([[statement]], HIDDEN=hidden), Found)
    ]
    if len(matches) != 1:
        return None
    (match,) = matches
    mask, rows, name = (match[hole] for hole in ("MASK", "ROWS", "ADD"))
    method = method_of(view, owner.name, name)
    order = [hidden, mask, rows]
    if method is None or len(set(order)) < len(order) or not {mask, rows} <= parameter_names(forward):
        return None
    node, home = method.node, method.home
    try:
        added = operands_of(view, home, node) if home is not None else []
    except Missed:
        return None
    if home is None or added != [argument.arg for argument in node.args.args[1:]]:
        return None
    used = [node for node in walk_ast(forward) if isinstance(node, ast.Name) and node.id in (mask, rows)]
    inside = {id(part) for part in walk_ast(match.first)}
    if any(id(node) not in inside for node in used) or {mask, rows} & bound_names(forward.body):
        return None
    (call,) = (call for call in calls_in(match.first) if own_attribute(call.func))
    return Addition(match.first, call, name, mask, rows, f"{home.name}.{name}")
