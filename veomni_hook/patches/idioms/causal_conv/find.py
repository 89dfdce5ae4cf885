"""Causal convolutions of one channel at a time: the calls of the function that computes a whole sequence.

    causal_conv1d_fn(hidden_states, ...)
    ->  veomni_causal_conv.separated(slot, self, causal_conv1d_fn)(hidden_states, ...)

They are routed where the rest of the layer keeps samples apart, too: beside the gated delta rule. Elsewhere a
state space or another rule would mix the samples behind the convolution.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from veomni_hook.patches.idioms.function_calls import Declared, calls_named, check, routed
from veomni_hook.patches.idioms.gated_delta_rule.find import separated_methods
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed, Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "causal_conv"
CANDIDATES = (
    "every method that calls a function whose name contains causal_conv1d, except the functions that update"
    " a cache token by token (causal_conv1d_update)"
)
_VARIANT = "depthwise"
_NAME = re.compile(r"causal_conv1d(?!_update)")
_DECLARED = Declared(
    "causal_conv1d_fn", ("hidden_states", "weight", "bias", "activation"), ("seq_idx", "cu_seqlens")
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, method, calls in calls_named(view, _NAME):
        try:
            check(view, method, calls, _DECLARED)
            if target not in separated_methods(view):
                raise Missed("nothing keeps samples apart in the rest of the method")
        except Missed as missed:
            yield Site(OP, target, Status.MISSED, reason=str(missed), lineno=calls[0].lineno)
        else:
            yield routed(view, target, calls, (OP, _VARIANT), "calls")
