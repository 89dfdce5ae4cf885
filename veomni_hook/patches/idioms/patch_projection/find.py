"""Convolutions over disjoint blocks: a kernel slot at the calls of a class's own convolutions.

    embeddings = self.proj(pixels)  ->  embeddings = slot.call(self, self.proj, pixels)

``self.proj`` is what ``__init__`` creates by calling torch's Conv1d, Conv2d or Conv3d with one expression for
stride and kernel. The slot checks at every call that the object is exactly that, that its sizes are so, and
that nothing observes its calls; else it calls the object.
"""

from __future__ import annotations

from collections.abc import Iterator

from veomni_hook.patches.code.expressions import last_name
from veomni_hook.patches.idioms.module_calls import own_calls, routed_calls
from veomni_hook.patches.idioms.patch_projection.read import convolutions_by_class, differences, other_uses
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "VARIANT", "find"]

OP = "patch_projection"
VARIANT = "disjoint_blocks"
CANDIDATES = (
    "every method that calls one of its own attributes to which __init__ assigns a call of torch's Conv1d,"
    " Conv2d or Conv3d whose stride is the same expression as its kernel_size, other than 1, maybe in one"
    " branch of a condition; every class whose __init__ creates such a convolution in another way: in a"
    " container, as an argument, or for an attribute that nothing calls; and in a class whose name contains"
    " PatchEmbed every convolution that __init__ creates, whatever its stride"
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    if "Conv" not in view.document.source:
        return
    convolutions = convolutions_by_class(view)
    called: dict[str, set[str]] = {name: set() for name in convolutions}
    for owner in view.classes.values():
        own = convolutions[owner.name]
        for name, method in view.methods(owner).items() if own else ():
            calls = [call for attribute, call in own_calls(method) if attribute in own]
            if name != "__init__" and calls:
                called[owner.name].update(last_name(call.func) for call in calls)
                yield routed_calls(
                    view,
                    owner,
                    method,
                    calls,
                    (OP, VARIANT),
                    noun="convolution",
                    differences=differences(own),
                )
    for owner in view.classes.values():
        uses = list(other_uses(view, owner, convolutions[owner.name], called))
        if uses:
            reason = "; ".join(dict.fromkeys(f"{reason} (line {lineno})" for reason, lineno in uses))
            yield Site(OP, f"{owner.name}.__init__", Status.MISSED, reason=reason, lineno=uses[0][1])
