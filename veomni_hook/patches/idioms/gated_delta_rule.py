"""Linear attention by the gated delta rule: the calls of the function that computes it chunk by chunk.

    torch_chunk_gated_delta_rule(query, ...)
    ->  veomni_gated_delta_rule.separated(slot, self, torch_chunk_gated_delta_rule)(query, ...)

The function that decodes position by position stays upstream's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from veomni_hook.patches.idioms.function_calls import Declared, calls_named, check, packages, routed
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed, Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find", "separated_methods"]

OP = "gated_delta_rule"
WORDS = "chunk delta"
CANDIDATES = (
    "every method that calls a function whose name contains chunk and delta (torch_chunk_gated_delta_rule,"
    " chunk_kimi_delta_attention); the functions that decode token by token are not counted"
)
_NAME = re.compile(r"chunk\w*delta")
_PARAMETERS = (
    *("query", "key", "value", "g", "beta", "chunk_size", "initial_state"),
    *("output_final_state", "use_qk_l2norm_in_kernel"),
)
#: The variants, by the package's function that upstream's is declared to be.
_DECLARED = {
    "scalar_decay": Declared("chunk_gated_delta_rule", _PARAMETERS, ("cu_seqlens",)),
    "channel_decay": Declared("chunk_kda", _PARAMETERS, ("cu_seqlens",)),
}


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, method, calls in calls_named(view, _NAME):
        names = packages(view, target, calls[0])
        declared = (variant for variant, function in _DECLARED.items() if function.name in names)
        variant = next(declared, "scalar_decay")
        try:
            check(view, target, method, calls, _DECLARED[variant])
        except Missed as missed:
            yield Site(OP, target, Status.MISSED, reason=missed.reason, lineno=calls[0].lineno)
        else:
            yield routed(view, target, method, calls, (OP, variant))


def separated_methods(view: ModuleView) -> set[str]:
    """The methods of a module whose gated delta rule is routed."""
    return {site.target for site in view.sites(find) if site.status is Status.ROUTED}
