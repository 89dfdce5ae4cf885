"""Causal convolutions of one channel at a time: the calls of the function that computes a whole sequence.

    causal_conv1d_fn(hidden_states, ...)
    ->  veomni_causal_conv.separated(slot, self, causal_conv1d_fn)(hidden_states, ...)

Earlier releases call a package's function, if there is one, or the module:

    F.silu(self.conv1d(x)[:, :, : x.shape[-1]])
    ->  veomni_causal_conv.separated(slot, self, upstream, ...)(x, weight, bias, "silu")

They are routed where the rest of the layer keeps samples apart, too: beside the gated delta rule, or where
the convolution is all that mixes positions. Elsewhere a state space or another rule would mix the samples
behind the convolution.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import last_name, walk_ast
from veomni_hook.patches.idioms.function_calls import Declared, asked, calls_named, check, packages, routed
from veomni_hook.patches.idioms.gated_delta_rule import separated_methods
from veomni_hook.patches.idioms.position_mixing import handed_down, mixing
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "causal_conv"
WORDS = "causal_conv1d"
CANDIDATES = (
    "every method that calls a function whose name contains causal_conv1d, except the functions that update"
    " a cache token by token (causal_conv1d_update)"
)
_VARIANT = "depthwise"
_NAME = re.compile(r"causal_conv1d(?!_update)")
_DECLARED = Declared(
    "causal_conv1d_fn", ("hidden_states", "weight", "bias", "activation"), ("seq_idx", "cu_seqlens")
)
_EITHER = Template(
    """
if self.PACKAGED is not None:
    RESULT = self.PACKAGED(x=X, weight=self.MODULE.weight.squeeze(1), bias=self.MODULE.bias, **OTHERS)
else:
    RESULT = torch.nn.functional.silu(self.MODULE(X)[:, :, : X.shape[-1]])
""",
    names="X",
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, method, calls in calls_named(view, _NAME):
        try:
            if not (otherwise := _otherwise(view, target, method, calls)):
                check(view, target, method, calls, _DECLARED)
            if target not in separated_methods(view):
                _check_alone(view, target)
        except Missed as missed:
            yield Site(OP, target, Status.MISSED, reason=missed.reason, lineno=calls[0].lineno)
        else:
            site = routed(view, target, method, calls, (OP, _VARIANT))
            yield replace(site, edits=(*site.edits, *otherwise))


def _otherwise(
    view: ModuleView, target: str, method: FunctionNode, calls: list[ast.Call]
) -> tuple[Edit, ...]:
    """The edit of a call of the module, in the other branch of the call of a package's function, if any."""
    matches = (_EITHER.match(node, view.scope.dotted) for node in walk_ast(method))
    match = next(filter(None, matches), None)
    if match is None or len(calls) > 1 or packages(view, target, calls[0]) != {_DECLARED.name}:
        return ()
    *_, own = (node.value for node in walk_ast(match.first) if isinstance(node, ast.Assign))
    module, x = f"self.{match['MODULE']}", match["X"]
    upstream = f"veomni_{OP}.called({module}, lambda {x}, *_, **__: {view.text(own)})"
    text = asked(method, (OP, _VARIANT), upstream, "None")
    return (in_place(view, own, f'{text}({x}, {module}.weight.squeeze(1), {module}.bias, "silu")'),)


def _check_alone(view: ModuleView, target: str) -> None:
    """Check that a method's class mixes positions by its convolution alone, and gets the boundaries.

    Raises:
        Missed: it does not.
    """
    name = target.partition(".")[0]
    calls = [call for mixer in mixing(view) if mixer.name == name for _, call in mixer.calls]
    if not all(_NAME.search(last_name(call.func)) for call in calls):
        raise Missed("nothing keeps samples apart in the rest of the method", code=Code.NO_BOUNDARIES)
    if not handed_down(view, name, "cu_seq_lens_q"):
        raise Missed("the layers around it do not hand on the boundaries of samples", code=Code.NO_BOUNDARIES)
    if not all(any(keyword.arg is None for keyword in call.keywords) for call in calls):
        raise Missed("the call does not pass all arguments of the layer", code=Code.OTHER_ARGUMENTS)
