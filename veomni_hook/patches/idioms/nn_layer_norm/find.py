"""Torch's ``nn.LayerNorm``: a kernel slot at the calls of a class's own norms.

    hidden_states = self.norm(hidden_states)  ->  hidden_states = slot.call(self, self.norm, hidden_states)

``self.norm`` is whatever ``__init__`` creates by calling ``nn.LayerNorm``. The slot checks at every call that
the object is exactly that, and that nothing observes its calls; else it calls the object.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.expressions import last_name
from veomni_hook.patches.code.scope import own_names
from veomni_hook.patches.idioms.add_rms_norm.read import has_self
from veomni_hook.patches.idioms.nn_layer_norm.read import (
    collections_of_norms,
    norms_by_class,
    other_uses,
    own_calls,
)
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status
from veomni_hook.patches.slots import formula_slot, slot_name

__all__ = ["CANDIDATES", "OP", "VARIANT", "find"]

OP = "nn_layer_norm"
VARIANT = "rounded_once"
CANDIDATES = (
    "every method that calls one of its own attributes to which __init__ assigns a call of torch's LayerNorm,"
    " maybe in one branch of a condition; and every class whose __init__ uses torch's LayerNorm in another"
    " way: in a container, as an argument, from a dictionary of the file, or for an attribute that nothing"
    " calls"
)
# Between what is called and its arguments.
_OPENING = re.compile(r"\s*\(")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    if "LayerNorm" not in view.document.source:
        return
    norms = norms_by_class(view)
    called: dict[str, set[str]] = {name: set() for name in norms}
    for owner in view.classes.values():
        own = norms[owner.name]
        for name, method in view.methods(owner).items():
            calls = [call for attribute, call in own_calls(method) if attribute in own] if own else []
            if name != "__init__" and calls:
                called[owner.name].update(last_name(call.func) for call in calls)
                yield _site(view, owner, method, calls)
    collections = collections_of_norms(view)
    for owner in view.classes.values():
        uses = list(other_uses(view, owner, called, collections))
        if uses:
            reason = "; ".join(dict.fromkeys(f"{reason} (line {lineno})" for reason, lineno in uses))
            yield Site(OP, f"{owner.name}.__init__", Status.MISSED, reason=reason, lineno=uses[0][1])


def _site(view: ModuleView, owner: ast.ClassDef, method: FunctionNode, calls: list[ast.Call]) -> Site:
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    edits, reasons = [], []
    for call in calls:
        edit = _edit(view, method, call)
        if isinstance(edit, str):
            reasons.append(f"{edit} (line {call.lineno})")
        else:
            edits.append(edit)
    site = Site(
        OP,
        f"{owner.name}.{method.name}",
        Status.ROUTED,
        VARIANT,
        reason="; ".join(reasons),
        captures={"norm": ", ".join(dict.fromkeys(ast.unparse(call.func) for call in calls))},
        edits=tuple(edits),
        slots=(formula_slot(OP, VARIANT),),
        lineno=calls[0].lineno,
    )
    return site if edits else replace(site, status=Status.MISSED, variant="", captures={}, slots=())


def _edit(view: ModuleView, method: FunctionNode, call: ast.Call) -> Edit | str:
    """The edit that asks the slot at a call, or why there is none."""
    if not has_self(method) or "self" in own_names(method.body):
        return "self is not the method's module"
    if call.keywords or len(call.args) != 1 or isinstance(call.args[0], (ast.Starred, ast.GeneratorExp)):
        return "the norm is called with more than one operand"
    document = view.document
    opening = _OPENING.match(document.source, document.end(call.func))
    if opening is None:
        return "the norm is in brackets"
    text = f"{slot_name(OP, VARIANT)}.call(self, {ast.unparse(call.func)}, "
    return Edit(document.start(call.func), opening.end(), text)
