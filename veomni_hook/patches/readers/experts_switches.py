"""Find the methods that set the experts implementation, by their assignments."""

from __future__ import annotations

import ast

from veomni_hook.patches.text.document import FunctionNode
from veomni_hook.patches.text.walk import walk_ast

__all__ = ["RESOLVED", "is_request", "setter_of"]

RESOLVED = "_experts_implementation_internal"


def setter_of(owner: ast.ClassDef) -> FunctionNode | None:
    """The setter of ``_experts_implementation``, if it stores the value and passes it to sub-configs."""
    for node in owner.body:
        if (
            isinstance(node, ast.FunctionDef)
            and [ast.unparse(decorator) for decorator in node.decorator_list] == [f"{node.name}.setter"]
            and node.name == RESOLVED.removesuffix("_internal")
            and len(node.args.args) == 2
            and _assigns(node)
            and any(isinstance(each, ast.Attribute) and each.attr == "sub_configs" for each in walk_ast(node))
        ):
            return node
    return None


def is_request(function: FunctionNode) -> bool:
    """Whether the method stores its argument and has no return statement."""
    returns = any(isinstance(node, ast.Return) for node in walk_ast(function))
    return len(function.args.args) == 2 and _assigns(function) and not returns


def _assigns(function: FunctionNode) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == RESOLVED and isinstance(node.ctx, ast.Store)
        for node in walk_ast(function)
    )
