"""Being written."""

from __future__ import annotations

from collections.abc import Iterator

from veomni_hook.patches.idioms.site import Site
from veomni_hook.patches.idioms.view import ModuleView

__all__ = ["CANDIDATES", "OP", "find"]

OP = "load_balancing_loss"
CANDIDATES = ""


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    yield from ()
