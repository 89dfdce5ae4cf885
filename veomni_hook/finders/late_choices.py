"""A kernel is chosen by name for an op after modules were imported without the places of the op.

Modules are edited for an op of which `auto` takes no kernel only where the choice of kernels names one.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache

from veomni_hook.finders.log import warn_once
from veomni_hook.finders.outcome import NOTHING
from veomni_hook.finders.state import STATE
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.layout import shortened

__all__ = ["warn_of_late"]


def warn_of_late(ops: Collection[str]) -> None:
    """Warn once for each of these ops if modules were imported that have places of it, unedited."""
    for op in ops:
        if registry.by_name(op) and (
            late := [m for m in STATE.outcomes if m in sys.modules and _lacks(m, op)]
        ):
            warn_once(
                f"a kernel of {op} is chosen, but {shortened(late)} was imported before, when none was: its "
                "places run upstream's code. Fix: name the kernel before the first import, by VEOMNI_KERNELS "
                "or activate(kernels=...)",
                about=f"unchosen {op}",
            )


def _lacks(module: str, op: str) -> bool:
    """Whether a module was imported without its places of an op."""
    outcome = STATE.outcomes[module]
    if outcome.patched:
        return any((s["op"], s["status"]) == (op, "unchosen") for s in outcome.report.get("missed", ()))
    return outcome.reason == NOTHING and op in _ops_of(module, outcome.origin)


# A choice may be made in every step.
@cache
def _ops_of(module: str, origin: str) -> set[str]:
    from veomni_hook.patches.code.document import Document  # reports of unpatched modules are not kept
    from veomni_hook.patches.idioms.recognise import recognise

    with open(origin, encoding="utf-8") as file:
        return {site.op for site in recognise(Document(file.read(), module)) if site.edits}
