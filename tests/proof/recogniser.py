"""What the proof takes from the idioms' side of the library: the only place that knows where it lives."""

from __future__ import annotations

from veomni_hook.patches.idioms.recognise import recognise
from veomni_hook.patches.routes.site import Site, Status
from veomni_hook.patches.text.document import Document

__all__ = ["Site", "routed_in"]


def routed_in(source: str, module: str) -> list[Site]:
    """The routed sites of a module's source text."""
    return [site for site in recognise(Document(source, module)) if site.status is Status.ROUTED]
