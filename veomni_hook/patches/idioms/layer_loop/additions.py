"""Features of images that are added between the layers (deepstack), at the rows of a mask.

    if features is not None and index in range(len(features)):
        hidden_states = self.add(hidden_states, mask, features[index])

The method does nothing but add the rows. Then what it adds to zeros, at all positions, can be made before the
loop and sliced like the hidden states.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_names, parameter_names
from veomni_hook.patches.code.tree import own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.modules import method_of
from veomni_hook.patches.idioms.row_merge.added import operands_of
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["Addition", "addition_in", "without"]


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

    statement: ast.If
    call: ast.Call
    method: str
    mask: str
    rows: str
    target: str


def addition_in(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, loop: ast.For, hidden: str
) -> Addition | None:
    """The only statement of a loop that adds rows, if nothing else of the forward uses mask and rows."""
    found = [each for each in loop.body if (_matched(each, hidden)) is not None]
    if len(found) != 1 or not isinstance(statement := found[0], ast.If):
        return None
    call, mask, rows = _matched(statement, hidden)  # type: ignore[misc]
    name = own_attribute(call.func)
    method = method_of(view, owner.name, name)
    order = [hidden, mask, rows]
    if method is None or len(set(order)) < len(order) or not {mask, rows} <= parameter_names(forward):
        return None
    node, holder = method
    if operands_of(view, view.classes[holder], node) != [each.arg for each in node.args.args[1:]]:
        return None
    used = [each for each in walk_ast(forward) if isinstance(each, ast.Name) and each.id in (mask, rows)]
    inside = {id(each) for each in walk_ast(statement)}
    if any(id(each) not in inside for each in used) or {mask, rows} & bound_names(forward.body):
        return None
    return Addition(statement, call, name, mask, rows, f"{holder}.{name}")


def without(loop: ast.For, addition: Addition | None) -> ast.For:
    """The loop without the statement; the hidden states are of the same positions and width behind it."""
    if addition is None:
        return loop
    body = [each for each in loop.body if each is not addition.statement]
    rest = ast.For(loop.target, loop.iter, body, loop.orelse, loop.type_comment)
    return ast.copy_location(rest, loop)


def _matched(statement: ast.stmt, hidden: str) -> tuple[ast.Call, str, str] | None:
    match statement:
        case ast.If(
            test=ast.BoolOp(
                op=ast.And(),
                values=[
                    ast.Compare(
                        left=ast.Name(id=asked), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]
                    ),
                    ast.Compare(left=ast.Name(id=index), ops=[ast.In() | ast.Lt()]) as within,
                ],
            ),
            body=[
                ast.Assign(
                    targets=[ast.Name(id=target)],
                    value=ast.Call(
                        args=[
                            ast.Name(id=first),
                            ast.Name(id=mask),
                            ast.Subscript(value=ast.Name(id=rows), slice=ast.Name(id=at)),
                        ],
                        keywords=[],
                    ) as call,
                )
            ],
            orelse=[],
        ) if (target, first, asked, at) == (hidden, hidden, rows, index) and own_attribute(call.func):
            names = {each.id for each in walk_ast(within) if isinstance(each, ast.Name)}
            return (call, mask, rows) if names <= {index, rows, "range", "len"} else None
    return None
