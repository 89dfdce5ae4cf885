"""Where transformers loads a checkpoint: raise an error for experts left at their random initialisation.

Not kernel code: inserts calls of `veomni_hook.checkpoints.loaded` (see there for the reason) before the
loading code and before the end, where the loading report is complete. A caller that requests this report
(``output_loading_info``) gets it, with the missing experts, instead of the error. If a release has different
code, the site is a miss, which ``veomni-hook explain`` shows, and nothing is checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from veomni_hook.patches.readers.checkpoint_loading import (
    FINISH,
    LOAD,
    START,
    asks_for_list,
    loading_calls,
    reports,
)
from veomni_hook.patches.routes.site import Site, Splice, Status
from veomni_hook.patches.routes.splice import before_statement
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["CANDIDATES", "OP", "find"]

OP = "moe_experts"
CANDIDATES = "nothing is counted: this is where checkpoints are loaded, not experts"

_CODE = "from veomni_hook.checkpoints.loaded import {0}\n\n{0}({1})"
_COMMENT = "experts that a checkpoint lacks are an error"
_CHECKS = {
    START: ("give_list", asks_for_list),
    LOAD: ("before_loading", loading_calls),
    FINISH: ("after_loading", reports),
}


def find(view: ModuleView) -> Iterator[Site]:
    """The three methods of transformers' own model class; nothing elsewhere."""
    for owner in view.classes.values() if LOAD in view.document.source else ():
        methods = view.methods(owner)
        for name, (check, read) in _CHECKS.items() if _CHECKS.keys() <= methods.keys() else ():
            splices: list[Splice] = []
            # Without additions at the end, the list would contain less than the error that it replaces.
            known = name != START or reports(methods[FINISH])
            for statement, names in read(methods[name]).items() if known else ():
                code = _CODE.format(check, ", ".join(names))
                splices += before_statement(view, methods[name], statement, code, _COMMENT)
            status = Status.ROUTED if splices else Status.MISSED
            reason = "checks the checkpoint's experts" if splices else "the loading code is unknown"
            at, line = f"{owner.name}.{name}", methods[name].lineno
            yield Site(OP, at, status, reason=reason, splices=tuple(splices), counted=False, lineno=line)
