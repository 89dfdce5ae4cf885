"""Where transformers sets the implementation of experts or attention: record that a user made the choice.

Not kernel code: inserts calls of an op's ``provenance`` (`veomni_hook.kernels.shared.recorded_choice` has the
reason) into

* the setter of a config's ``_<kind>_implementation`` and the method that excludes private keys from saved
  data, both or neither;
* a model's ``set_<kind>_implementation``.

They are found by their assignments. If a release is built differently, there is no site, and provenance
reports that the origin is unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.tree import chain, walk_ast
from veomni_hook.patches.routes.guards import after_body, before_body
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

#: The op that lists it; its sites name their own.
OP = "attention"
WORDS = "_attn_implementation_internal | _experts_implementation_internal"
CANDIDATES = "nothing is counted: these are the switches of attention and experts, not attention and experts"

#: Parameters that the setter of a model may have beside the value.
_OTHERS = {"allow_all_kernels"}
#: The attribute of a config, and of a model's setting, that stores what will run.
_RESOLVED = "_{}_implementation_internal"
#: What may be chosen, as in ``experts_implementation``, by the op whose kernels yield to the user's choice.
_KINDS = {"attention": "attn", "moe_experts": "experts"}


def find(view: ModuleView) -> Iterator[Site]:
    """What sets the implementation of attention, then what sets that of experts.

    The config class and the model class of transformers' own modules; nothing elsewhere.
    """
    for op, kind in _KINDS.items():
        for owner in view.classes.values():
            methods = view.methods(owner)
            setter, saved = _setter_of(owner, kind), methods.get("_remove_keys_not_serialized")
            if setter is not None and saved is not None and len(saved.args.args) == 2:
                target = f"{owner.name}.{setter.name}.setter"
                yield _site(view, op, target, setter, "note_assignment", setter.args.args)
                target = f"{owner.name}.{saved.name}"
                yield _site(view, op, target, saved, "forget_choice", saved.args.args[1:])
            request = methods.get(f"set_{kind}_implementation")
            if request is not None and _is_request(request, kind):
                target, passed = f"{owner.name}.{request.name}", request.args.args[:2]
                yield _site(view, op, target, request, "note_request", passed, after_body)


def _site(
    view: ModuleView,
    op: str,
    target: str,
    function: FunctionNode,
    note: str,
    passed: Sequence[ast.arg],
    insert: Callable[[ModuleView, FunctionNode, str, str], tuple[Edit, ...]] = before_body,
) -> Site:
    # Imported at the rare call: transformers imports the config module as one of the first.
    call = f"{note}({', '.join(argument.arg for argument in passed)})"
    code = f"from veomni_hook.kernels.{op}.provenance import {note}\n\n{call}"
    setting = f"{_KINDS[op]}_implementation"
    return Site(
        op=op,
        target=target,
        status=Status.ROUTED,
        reason=f"notes the user's {setting}",
        edits=insert(view, function, code, f"a user's {setting} is told from transformers' default"),
        counted=False,
        lineno=function.lineno,
    )


def _setter_of(owner: ast.ClassDef, kind: str) -> FunctionNode | None:
    """The setter of a config's property, if it stores the value and passes it to sub-configs."""
    for node in owner.body:
        if (
            isinstance(node, ast.FunctionDef)
            and node.name == f"_{kind}_implementation"
            and [chain(decorator) for decorator in node.decorator_list] == [f"{node.name}.setter"]
            and len(node.args.args) == 2
            and _stores(node, kind)
            and any(getattr(inner, "attr", "") == "sub_configs" for inner in walk_ast(node))
        ):
            return node
    return None


def _is_request(function: FunctionNode, kind: str) -> bool:
    """Whether a model's method stores its first argument and has no return statement."""
    returns = any(isinstance(node, ast.Return) for node in walk_ast(function))
    others = {argument.arg for argument in function.args.args[2:]}
    plain = len(function.args.args) >= 2 and others <= _OTHERS
    return plain and _stores(function, kind) and not returns


def _stores(function: FunctionNode, kind: str) -> bool:
    """Whether a method assigns what will run."""
    attributes = [node for node in walk_ast(function) if isinstance(node, ast.Attribute)]
    stored = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    return _RESOLVED.format(kind) in stored
