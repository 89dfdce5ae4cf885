"""Torch's ``nn.LayerNorm``: a kernel slot at the calls of a class's own norms.

    hidden_states = self.norm(hidden_states)  ->  hidden_states = slot.call(self, self.norm, hidden_states)

``self.norm`` is whatever ``__init__`` creates by calling ``nn.LayerNorm``. The slot checks at every call that
the object is exactly that, and that nothing observes its calls; else it calls the object.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from veomni_hook.patches.idioms.module_calls import sites_of_calls
from veomni_hook.patches.idioms.nn_layer_norm.read import collections_of_norms, norms_by_class, other_uses
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

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
    others = partial(other_uses, view, collections_of_norms(view))
    yield from sites_of_calls(view, (OP, VARIANT), "norm", norms_by_class(view), others)
