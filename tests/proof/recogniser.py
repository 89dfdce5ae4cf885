"""What the proof takes from the idioms' side of the library: the only place that knows where it lives."""

from __future__ import annotations

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.recognise import asked, recognise
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status


def routed_in(source: str, module: str, op: str | None = None) -> list[Site]:
    """The routed sites of a module's source text; only those of one op, by its own idioms, are found sooner."""
    document = Document(source, module)
    if op is None:
        sites = recognise(document, optional=("layer_loop.find",))
    else:
        view = ModuleView(document)
        sites = [
            site
            for idiom in asked(("layer_loop.find",), source)
            if idiom.OP == op
            for site in idiom.find(view)
        ]
    return [site for site in sites if site.status is Status.ROUTED]
