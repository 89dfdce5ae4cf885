"""Apply only the edits of sites to a module's text, as the engine does, and execute it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from veomni_hook.kernels.slot import Slot
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import apply_edits
from veomni_hook.patches.routes.compose import composed, with_copies
from veomni_hook.patches.routes.config import routes
from veomni_hook.patches.site import Site


def spliced(source: str, sites: Iterable[Site]) -> str:
    """Return ``source`` with the edits of all ``sites``."""
    edits = [replace(edit, patch=number) for number, site in enumerate(sites) for edit in site.edits]
    document = Document(source)
    return apply_edits(source, with_copies(document, composed(document, edits)[0]))


def in_lines(text: str) -> str:
    """The code with every statement on one line."""
    return ast.unparse(ast.parse(text))


def executed(source: str, sites: Iterable[Site] = ()) -> dict[str, Any]:
    """Return the globals of the module ``source`` with the edits and the slots of ``sites``."""
    sites = list(sites)
    config = routes(sites, "lookalike")
    slots = config.slots if config is not None else [slot for site in sites for slot in site.slots]
    made = "".join(
        f"{each.name} = Slot({each.op!r}, {each.variant!r}, __name__, skips={dict(each.skips)!r})\n"
        for each in slots
    )
    imported = dict.fromkeys(pair for site in sites for pair in site.imports)
    made += "".join(f"from {module} import {name}\n" for module, name in imported)
    scope: dict[str, Any] = {"__name__": "lookalike", "Slot": Slot}
    # In the module's own frame, as with the engine, because a slot looks up code there.
    tree = ast.parse(spliced(source, sites))
    future = [each for each in tree.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    tree.body = [*future, *ast.parse(made).body, *(each for each in tree.body if each not in future)]
    exec(compile(tree, "lookalike.py", "exec"), scope)
    return scope
