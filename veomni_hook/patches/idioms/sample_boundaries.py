"""Models whose layers mix the positions of a row: they find the boundaries of samples first.

    for layer in self.layers: hidden_states = layer(hidden_states, ..., **kwargs)

Code in front of everything else puts the boundaries into ``kwargs`` if samples share a row
(`veomni_hook.kernels.gated_delta_rule.boundaries`), for layers that kernels compute. If a layer is among
those that nothing keeps apart, the code raises an error instead. The idiom asks for no kernel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import last_name, walk_ast
from veomni_hook.patches.idioms import causal_conv, gated_delta_rule, pooled_windows
from veomni_hook.patches.idioms.position_mixing import (
    Mixing,
    drops,
    hands_to_layers,
    layer_loops,
    mixing,
)
from veomni_hook.patches.routes.cache_parameter import cache_parameters, hands_on_cache, made_unasked
from veomni_hook.patches.routes.guards import before_body, in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status
from veomni_hook.patches.upstream_names import names

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "sample_boundaries"
WORDS = ""
CANDIDATES = (
    "in a module with a class that mixes the positions of a row (it calls a causal convolution, a rule of"
    " deltas or a scan, gives a cache the state of one, or gets it as rnn_state; or it calls one that pools"
    " windows of positions), every forward that takes input_ids and loops over its own layers (self.layers,"
    " self.blocks), or calls a model that does without its own other arguments"
)
_FOUND, _REFUSED = "found_once", "refused"
_IMPORT = ("veomni_hook.kernels.gated_delta_rule", "boundaries as veomni_boundaries")
_MASKS = re.compile(r"^create_\w*causal_mask$")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    if not (classes := [*mixing(view), *pooled_windows.pooling(view)]):
        return
    routed = _routed(view)
    apart: list[Mixing] = []
    others: list[Mixing] = []
    for mixer in classes:
        called = [(f"{mixer.name}.{method}", last_name(call.func)) for method, call in mixer.calls]
        is_routed = bool(called) and all(name in routed.get(target, ()) for target, name in called)
        (apart if is_routed else others).append(mixer)
    forwards = [
        forward for forward in view.forwards() if parameter_names(forward[1]).intersection(names("token ids"))
    ]
    models = {owner.name for owner, forward in forwards if layer_loops(forward)}
    for owner, forward in forwards:
        target = f"{owner.name}.forward"
        if owner.name in models:
            yield _site(view, target, forward, apart, others)
        elif drops(owner, forward, models):
            yield _site(view, target, forward, [], classes)


def _routed(view: ModuleView) -> dict[str, set[str]]:
    """The functions whose calls ask a kernel, by the method."""
    by_method: dict[str, set[str]] = {}
    idioms = (gated_delta_rule, causal_conv, pooled_windows)
    for site in (site for idiom in idioms for site in view.sites(idiom.find)):
        if site.status is Status.ROUTED:
            by_method.setdefault(site.target, set()).update(site.captures["function"].split(", "))
    return by_method


def _site(
    view: ModuleView, target: str, forward: FunctionNode, apart: list[Mixing], others: list[Mixing]
) -> Site:
    """The site of a model with classes that kernels keep apart, and others."""
    passed = forward.args.kwarg.arg if forward.args.kwarg is not None else ""
    missed = partial(Site, OP, target, Status.MISSED, lineno=forward.lineno)
    taken = parameter_names(forward)
    ids, embeds, positions, masks, makes_cache = (
        next((name for name in names(meaning) if name in taken), "")
        for meaning in ("token ids", "embeddings", "positions", "mask", "whether it makes a cache")
    )
    if not embeds or not (positions or passed):
        absent = names("positions" if embeds else "embeddings")
        return missed(reason=Reason(f"it has no argument {' or '.join(absent)}", Code.OTHER_ARGUMENTS))
    caches = cache_parameters(view, forward)
    if len(caches) > 1:
        said = f"which of {', '.join(caches)} is its cache is not known"
        return missed(reason=Reason(said, Code.OTHER_ARGUMENTS))
    if not caches and ((apart and makes_cache) or hands_on_cache(view, forward)):
        said = "which of its arguments is its cache is not known"
        return missed(reason=Reason(said, Code.OTHER_ARGUMENTS))
    read = [
        positions or _among(passed, "positions"),
        masks or _among(passed, "mask"),
        *(caches or ["None"]),
        f"{ids} if {embeds} is None else {embeds}",
        makes_cache or _among(passed, "whether it makes a cache"),
    ]
    if not (hands_on := hands_to_layers(forward, "")):
        apart, others = [], [*apart, *others]
    # Where transformers makes masks for attention, it reads positions for them.
    makes_masks = any(
        isinstance(node, ast.Name | ast.Attribute) and _MASKS.match(last_name(node))
        for node in walk_ast(view.document.tree)
    )
    told = [] if makes_masks else ["masks_positions=False"]
    told += ["pools=True"] if view.sites(pooled_windows.find) else []
    code = _call(f"{passed} = veomni_boundaries.found", ["self", passed, *read, *told]) if apart else ""
    if others:
        refused = "".join(f"({other.name}, {other.takes(view) if hands_on else ()!r}), " for other in others)
        code += _call("veomni_boundaries.refuse", ["self", passed or "{}", *read, f"({refused.rstrip()})"])
    edits = before_body(view, forward, code, "samples that share a row")
    if apart and caches and (test := made_unasked(forward, caches[0])) is not None:
        asked = f"veomni_boundaries.makes_cache({passed}, {read[0]})"
        edits = (*edits, in_place(view, test, f"{ast.unparse(test)} and {asked}"))
    return Site.calling(OP, target, _FOUND if apart else _REFUSED, forward, edits, _IMPORT)


def _among(passed: str, meaning: str) -> str:
    """An argument that may be among the others; those of a forward without others are known to be absent."""
    return f'{passed}.get("{names(meaning)[0]}")' if passed else "None"


def _call(function: str, arguments: list[str]) -> str:
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return f"{function}(\n{lines})\n"
