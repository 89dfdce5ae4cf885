"""Torch's ``nn.LayerNorm``: a kernel slot at the calls of a class's own norms.

    hidden_states = self.norm(hidden_states)  ->  hidden_states = slot.call(self, self.norm, hidden_states)

``self.norm`` is whatever ``__init__`` creates by calling ``nn.LayerNorm``. The slot checks at every call that
the object is exactly that, and that nothing observes its calls; else it calls the object.
"""

from __future__ import annotations

from collections.abc import Iterator

from veomni_hook.patches.code.expressions import last_name
from veomni_hook.patches.idioms.module_calls import own_calls, routed_calls
from veomni_hook.patches.idioms.nn_layer_norm.read import collections_of_norms, norms_by_class, other_uses
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "VARIANT", "find"]

OP = "nn_layer_norm"
VARIANT = "rounded_once"
CANDIDATES = (
    "every method that calls one of its own attributes to which __init__ assigns a call of torch's LayerNorm,"
    " maybe in one branch of a condition; and every class whose __init__ uses torch's LayerNorm in another"
    " way: in a container, as an argument, from a dictionary of the file, or for an attribute that nothing"
    " calls"
)


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
                yield routed_calls(view, owner, method, calls, (OP, VARIANT), noun="norm")
    collections = collections_of_norms(view)
    for owner in view.classes.values():
        uses = list(other_uses(view, owner, called, collections))
        if uses:
            reason = "; ".join(dict.fromkeys(f"{reason} (line {lineno})" for reason, lineno in uses))
            yield Site(OP, f"{owner.name}.__init__", Status.MISSED, reason=reason, lineno=uses[0][1])
