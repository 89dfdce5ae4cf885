"""Applies the splices of sites to a module's text, as the engine does, and nothing else; and runs it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from veomni_hook.kernels.slot import Slot
from veomni_hook.patches.routes.site import Site


def spliced(source: str, sites: Iterable[Site]) -> str:
    """Return ``source`` with the edits of all ``sites``; those at one place go in as they come."""
    edits = [splice for site in sites for splice in site.splices]
    text, at = "", 0
    for splice in sorted(edits, key=lambda splice: splice.start):
        assert splice.start >= at, "splices overlap"
        text += source[at : splice.start] + splice.text
        at = splice.end
    return text + source[at:]


def executed(source: str, sites: Iterable[Site] = ()) -> dict[str, Any]:
    """Return the globals of the module ``source`` with the splices and the slots of ``sites``."""
    sites = list(sites)
    slots = {slot.name: Slot(slot.op, slot.variant, "lookalike") for site in sites for slot in site.slots}
    scope: dict[str, Any] = {"__name__": "lookalike", **slots}
    exec(compile(spliced(source, sites), "lookalike.py", "exec"), scope)
    return scope
