"""Convolutions over disjoint blocks: a kernel slot at the calls of a class's own convolutions.

    embeddings = self.proj(pixels)  ->  embeddings = slot.call(self, self.proj, pixels)

``self.proj`` is what ``__init__`` creates by calling torch's Conv1d, Conv2d or Conv3d with one expression for
stride and kernel. The slot checks at every call that the object is exactly that, that its sizes are so, and
that nothing observes its calls; else it calls the object.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from veomni_hook.patches.idioms.module_calls import sites_of_calls
from veomni_hook.patches.idioms.patch_projection.read import convolutions_by_class, difference, other_uses
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site

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
    created = convolutions_by_class(view)
    others = partial(other_uses, view, created)
    yield from sites_of_calls(view, (OP, VARIANT), "convolution", created, others, difference)
