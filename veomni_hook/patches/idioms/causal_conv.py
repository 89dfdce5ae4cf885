"""Causal convolutions of one channel at a time: the calls of the function that computes a whole sequence.

    causal_conv1d_fn(hidden_states, ...)
    ->  veomni_causal_conv.separated(slot, self, causal_conv1d_fn)(hidden_states, ...)

Earlier releases call a package's function if there is one, else the module. Both calls get all boundaries:

    x = self.causal_conv1d_fn(x=x, ..., seq_idx=...)
    ->  x = veomni_causal_conv.separated(slot, self, self.causal_conv1d_fn)(x, ..., seq_idx=..., **boundaries)
    x = F.silu(self.conv1d(x)[:, :, : x.shape[-1]])
    ->  x = veomni_causal_conv.separated(slot, self, upstream)(x, ..., seq_idx=..., **boundaries)

They are routed where the rest of the layer keeps samples apart, too: beside the gated delta rule, or where
the convolution is all that mixes positions. Elsewhere a state space or another rule would mix the samples
behind the convolution.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import last_name, walk_ast
from veomni_hook.patches.idioms.function_calls import (
    SEPARATION,
    Declared,
    added_boundaries,
    calls_named,
    check,
    held,
    of_package,
    routed,
)
from veomni_hook.patches.idioms.gated_delta_rule import separated_methods
from veomni_hook.patches.idioms.position_mixing import handed_down, mixing
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status, slot_name

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
    RESULT = self.PACKAGED(
        x=X, weight=self.MODULE.weight.squeeze(1), bias=self.MODULE.bias, activation=ACT, seq_idx=NUMBERS
    )
else:
    RESULT = torch.nn.functional.silu(self.MODULE(X)[:, :, : X.shape[-1]])
""",
    names="X",
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, method, calls in calls_named(view, _NAME):
        try:
            if (either := _either(view, target, method)) is not None:
                yield either
                continue
            check(view, target, method, calls, _DECLARED)
            if target not in separated_methods(view):
                _check_alone(view, target)
        except Missed as missed:
            yield Site(OP, target, Status.MISSED, reason=missed.reason, lineno=calls[0].lineno)
        else:
            yield routed(view, target, method, calls, (OP, _VARIANT))


def _either(view: ModuleView, target: str, method: FunctionNode) -> Site | None:
    """The site of a method that calls a package's function or a module, or None."""
    matches = (_EITHER.match(node, view.scope.dotted) for node in walk_ast(method))
    if (match := next(filter(None, matches), None)) is None:
        return None
    function = held(view, target, match["PACKAGED"])
    if method.args.kwarg is None or target not in separated_methods(view):
        raise Missed("nothing keeps samples apart in the rest of the method", match.first, Code.NO_BOUNDARIES)
    if of_package(view, getattr(function, "id", "")) != _DECLARED.name:
        raise Missed(
            f"{match['PACKAGED']} is not the {_DECLARED.name} of a package", match.first, Code.DECORATED
        )
    packaged, own = (node.value for node in walk_ast(match.first) if isinstance(node, ast.Assign))
    module, x = f"self.{match['MODULE']}", match["X"]
    upstream = f"veomni_{OP}.called({module}, lambda {x}, *_, **__: {view.text(own)})"
    ends = f"seq_idx={match['NUMBERS']}, {added_boundaries(method, 'cu_seq_lens_q')}"
    edits = [
        in_place(
            view,
            call,
            f"veomni_{OP}.separated({slot_name(OP, _VARIANT)}, self, {function})"
            f"({x}, {module}.weight.squeeze(1), {module}.bias, activation={activation}, {ends})",
        )
        for call, function, activation in (
            (packaged, f"self.{match['PACKAGED']}", match["ACT"]),
            (own, upstream, repr("silu")),
        )
    ]
    captures = {"function": match["PACKAGED"], "hidden_states": x}
    imports = ((f"veomni_hook.kernels.{OP}", f"calls as veomni_{OP}"), SEPARATION)
    return Site.asking(OP, target, _VARIANT, match.first, edits, captures=captures, imports=imports)


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
