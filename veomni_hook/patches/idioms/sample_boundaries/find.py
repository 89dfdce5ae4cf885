"""Models that hand their arguments to layers of linear attention: they find the boundaries of samples first.

    for layer in self.layers: hidden_states = layer(hidden_states, ..., **kwargs)

Code in front of everything else puts the boundaries into ``kwargs`` if samples share a row
(`veomni_hook.kernels.gated_delta_rule.boundaries`). The idiom asks for no kernel.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.expressions import own_attribute
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.idioms.gated_delta_rule.find import separated_methods
from veomni_hook.patches.routes.insertion import before_body
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "sample_boundaries"
CANDIDATES = (
    "in a module with a call of the gated delta rule that is routed, every forward that loops over its own"
    " layers (self.layers)"
)
_VARIANT = "found_once"
_IMPORT = ("veomni_hook.kernels.gated_delta_rule", "boundaries as veomni_boundaries")
_READ = ("position_ids", "attention_mask", "past_key_values", "input_ids", "inputs_embeds")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    if not separated_methods(view):
        return
    for owner, forward in view.forwards():
        if any(isinstance(each, ast.For) and _over_layers(each) for each in walk_ast(forward)):
            yield _site(view, f"{owner.name}.forward", forward)


def _site(view: ModuleView, target: str, forward: FunctionNode) -> Site:
    names = forward.args.kwarg.arg if forward.args.kwarg is not None else ""
    lacks = [name for name in _READ if name not in parameter_names(forward)]
    reason = f"it has no argument {lacks[0]}" if lacks else ""
    if not any(_hands_on(each, names) for each in walk_ast(forward)):
        reason = "it hands no other arguments to its layers"
    if reason:
        return Site(OP, target, Status.MISSED, reason=reason, lineno=forward.lineno)
    code = f"""\
{names} = veomni_boundaries.found(
    self,
    {names},
    position_ids,
    attention_mask,
    past_key_values,
    input_ids if inputs_embeds is None else inputs_embeds,
)
"""
    return Site(
        OP,
        target,
        Status.ROUTED,
        _VARIANT,
        edits=before_body(view, forward, code, "samples that share a row"),
        lineno=forward.lineno,
        imports=(_IMPORT,),
    )


def _over_layers(loop: ast.For) -> bool:
    return any(own_attribute(node) == "layers" for node in walk_ast(loop.iter))


def _hands_on(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and any(
        each.arg is None and isinstance(each.value, ast.Name) and each.value.id == name
        for each in node.keywords
    )
