"""Causal convolutions of one channel at a time: the calls of the function that computes a whole sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from veomni_hook.patches.idioms.function_calls import calls_named
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "causal_conv"
CANDIDATES = (
    "every method that calls a function whose name contains causal_conv1d, except the functions that update"
    " a cache token by token (causal_conv1d_update)"
)
_NAME = re.compile(r"causal_conv1d(?!_update)")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, call in calls_named(view, _NAME):
        yield Site(OP, target, Status.MISSED, reason="no kernel is known", lineno=call.lineno)
