"""Where transformers sets the experts implementation: record that a user made the choice.

Not kernel code: inserts calls of `veomni_hook.kernels.moe_experts.provenance` (see there for the reason) into

* the setter of a config's ``_experts_implementation`` and the method that excludes private keys from saved
  data, both or neither;
* a model's ``set_experts_implementation``.

The idiom finds them by their assignments. If a release is built differently, there is no site, and provenance
reports that the origin is unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.routes.insertion import after_body, before_body
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "moe_experts"
CANDIDATES = "nothing is counted: these are the switches of experts, not experts"

_RESOLVED = "_experts_implementation_internal"
_MODULE = "veomni_hook.kernels.moe_experts.provenance"
_COMMENT = "a user's experts_implementation is told from transformers' default"


def find(view: ModuleView) -> Iterator[Site]:
    """The config class and the model class of transformers' own modules; nothing elsewhere."""
    if _RESOLVED not in view.document.source:
        return
    for owner in view.classes.values():
        setter, saved = _setter_of(owner), view.methods(owner).get("_remove_keys_not_serialized")
        if setter is not None and saved is not None and len(saved.args.args) == 2:
            edits = _call_before(view, setter, "note_assignment", _parameters(setter))
            yield _site(f"{owner.name}.{setter.name}.setter", setter, edits)
            edits = _call_before(view, saved, "forget_choice", saved.args.args[1].arg)
            yield _site(f"{owner.name}.{saved.name}", saved, edits)
        request = view.methods(owner).get("set_experts_implementation")
        if request is not None and _is_request(request):
            yield _site(
                f"{owner.name}.{request.name}",
                request,
                after_body(view, request, _code("note_request", _parameters(request)), _COMMENT),
            )


def _site(target: str, function: FunctionNode, edits: tuple[Edit, ...]) -> Site:
    return Site(
        op=OP,
        target=target,
        status=Status.ROUTED,
        reason="notes the user's experts_implementation",
        edits=edits,
        counted=False,
        lineno=function.lineno,
    )


def _parameters(function: FunctionNode) -> str:
    return ", ".join(argument.arg for argument in function.args.args)


def _code(name: str, arguments: str) -> str:
    # Imported at the rare call: transformers imports the config module as one of the first.
    return f"from {_MODULE} import {name}\n\n{name}({arguments})"


def _call_before(view: ModuleView, function: FunctionNode, name: str, arguments: str) -> tuple[Edit, ...]:
    return before_body(view, function, _code(name, arguments), _COMMENT)


def _setter_of(owner: ast.ClassDef) -> FunctionNode | None:
    """The setter of ``_experts_implementation``, if it stores the value and passes it to sub-configs."""
    for node in owner.body:
        if (
            isinstance(node, ast.FunctionDef)
            and [ast.unparse(decorator) for decorator in node.decorator_list] == [f"{node.name}.setter"]
            and node.name == _RESOLVED.removesuffix("_internal")
            and len(node.args.args) == 2
            and _assigns(node)
            and any(isinstance(each, ast.Attribute) and each.attr == "sub_configs" for each in walk_ast(node))
        ):
            return node
    return None


def _is_request(function: FunctionNode) -> bool:
    """Whether the method stores its argument and has no return statement."""
    returns = any(isinstance(node, ast.Return) for node in walk_ast(function))
    return len(function.args.args) == 2 and _assigns(function) and not returns


def _assigns(function: FunctionNode) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == _RESOLVED and isinstance(node.ctx, ast.Store)
        for node in walk_ast(function)
    )
