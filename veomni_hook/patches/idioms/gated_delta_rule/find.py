"""Linear attention by the gated delta rule: the calls of the function that computes it chunk by chunk."""

from __future__ import annotations

import re
from collections.abc import Iterator

from veomni_hook.patches.idioms.function_calls import calls_named
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "gated_delta_rule"
CANDIDATES = (
    "every method that calls a function whose name contains chunk and delta (torch_chunk_gated_delta_rule,"
    " chunk_kimi_delta_attention); the functions that decode token by token are not counted"
)
_NAME = re.compile(r"chunk\w*delta")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, call in calls_named(view, _NAME):
        yield Site(OP, target, Status.MISSED, reason="no kernel is known", lineno=call.lineno)
