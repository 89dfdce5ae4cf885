"""What attention has to know of its mask, in functions that all models share.

* ``transformers.masking_utils.create_sliding_window_causal_mask`` notes a mask that is a window alone;
* ``transformers.masking_utils.create_causal_mask`` notes, while dynamo traces, a mask that is causal alone;
* ``transformers.integrations.sdpa_attention.sdpa_attention_forward`` asks a slot, if its mask is noted.

They are recognised by their parameters and by the statements that the inserted code relies on. If a release
has different code, the site is a miss, and that function stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import binding, calls_in, last_name, walk_ast
from veomni_hook.patches.routes.guards import before_statement
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status, formula_slot

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "attention"
WORDS = ""
CANDIDATES = "nothing is counted: the function is one that all models share"

_VARIANT = "sliding_window"
_ATTENTION = "sdpa_attention_forward"


class _Mask(NamedTuple):
    """A function that makes masks: its first pattern, the code that notes it, and what reports say."""

    pattern: Template
    note: str
    reason: str


_MASKS = {
    "create_sliding_window_causal_mask": _Mask(
        Template("mask_factory_function = sliding_window_causal_mask_function(sliding_window)"),
        """\
mask_interface = getattr(mask_interface, "veomni_watched", mask_interface)
if allow_is_causal_skip and getattr(mask_interface, "__module__", "") == __name__:
    from veomni_hook.kernels.attention.windows import note_window

    note_window(causal_mask, attention_mask, sliding_window)
""",
        "notes masks that are a causal sliding window alone",
    ),
    "create_causal_mask": _Mask(
        Template("mask_factory_function = causal_mask_function"),
        """\
if torch.compiler.is_dynamo_compiling() and allow_is_causal_skip and attention_mask is None:
    mask_interface = getattr(mask_interface, "veomni_watched", mask_interface)
    if getattr(mask_interface, "__module__", "") == __name__:
        from veomni_hook.kernels.attention.traced_masks import note

        note(causal_mask, None)
""",
        "notes, under torch.compile, masks that are causal alone",
    ),
}
#: What makes notes right: whatever is combined into the mask clears the flag, and a user may have registered
#: another function that makes masks.
_TABLE = "ALL_MASK_ATTENTION_FUNCTIONS"
_INTERFACE = Template("mask_interface = TABLE[config._attn_implementation]")
_CLEARED = Template("allow_is_causal_skip = False")
_MADE = Template("return causal_mask")

#: No call is asked about but those whose mask is noted as a window: in an attribute, or in dynamo's graph.
_GUARD = """\
if torch.compiler.is_dynamo_compiling():
    from veomni_hook.kernels.attention.traced_masks import is_noted

    noted = is_noted(attention_mask)
else:
    noted = hasattr(attention_mask, "_veomni_window") and not torch.compiler.is_compiling()
if {conditions}:
    operands = (query, key, value, attention_mask, module, scaling, dropout)
    if (kernel := {slot}.kernel(module, *operands)) is not None:
        return kernel(*operands)
"""
_OPTIONS = Template("sdpa_kwargs = {}")
_CALL = Template(
    "HOME.scaled_dot_product_attention("
    "*TENSORS, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, **MORE)"
)
_ATTENDED = Template("return attn_output, None")
_PARAMETERS = ["module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"]
#: Parameters of some releases: done with before the guard, or absent where the guard asks.
_DONE, _ABSENT = {"cache"}, {"position_bias"}


def find(view: ModuleView) -> Iterator[Site]:
    """The functions; nothing in other modules."""
    homes = {
        "transformers.masking_utils": dict.fromkeys(_MASKS, _note),
        "transformers.integrations.sdpa_attention": {_ATTENTION: _guard},
    }
    for name, route in homes.get(view.document.module, {}).items():
        if (function := view.functions.get(name)) is not None:
            site = Site(OP, name, Status.MISSED, counted=False, lineno=function.lineno)
            try:
                yield route(view, function, site)
            except Missed as missed:
                yield replace(site, reason=missed.reason)


def _note(view: ModuleView, function: FunctionNode, site: Site) -> Site:
    """The site that notes masks.

    Raises:
        Missed: a mask may hold more than the flag tells.
    """
    mask, last = _MASKS[function.name], function.body[-1]
    if not _MADE.match(last):
        raise Missed("it does not end with `return causal_mask`", last, Code.OTHER_FORM)
    ifs = [node for node in function.body if isinstance(node, ast.If)]
    cleared = {ast.unparse(node.test) for node in ifs if any(map(_CLEARED.match, node.body))}
    masks = _assignments([function], "mask_factory_function")
    bodies = [statement for node in ifs if ast.unparse(node.test) in cleared for statement in node.body]
    combined = _assignments(bodies, "mask_factory_function")
    if not masks or not mask.pattern.match(masks[0]) or {*masks[1:]} != {*combined}:
        raise Missed("it combines masks in another way", function, Code.OTHER_FORM)
    if not any(_INTERFACE.match(one, TABLE=_TABLE) for one in function.body):
        raise Missed("it chooses what makes masks in another way", function, Code.OTHER_FORM)
    if not _assignments([function], "allow_is_causal_skip"):
        raise Missed("it has no allow_is_causal_skip", function, Code.OTHER_ARGUMENTS)
    edits = before_statement(view, function, last, mask.note, "attention: what this mask is")
    return replace(site, status=Status.ROUTED, reason=mask.reason, edits=edits)


def _guard(view: ModuleView, function: FunctionNode, site: Site) -> Site:
    """The site that asks for a kernel.

    Raises:
        Missed: the function has other parameters, or computes something else.
    """
    names = [argument.arg for argument in function.args.args]
    others = {*names[len(_PARAMETERS) :]}
    if names[: len(_PARAMETERS)] != _PARAMETERS or others - _DONE - _ABSENT:
        raise Missed(f"its parameters differ: {', '.join(names)}", function, Code.OTHER_ARGUMENTS)
    start = next(filter(_OPTIONS.match, function.body), None)
    calls = [call for call in calls_in(function) if last_name(call.func) == "scaled_dot_product_attention"]
    if start is None or not calls or not _ATTENDED.match(function.body[-1]):
        raise Missed("it calls scaled_dot_product_attention in another way", function, Code.OTHER_FORM)
    if len(calls) > 1 or not _CALL.match(calls[0]):
        text = "it calls scaled_dot_product_attention with other arguments"
        raise Missed(text, calls[0], Code.OTHER_ARGUMENTS)
    slot = formula_slot(OP, _VARIANT)
    absent = (f"{name} is None" for name in sorted(others & _ABSENT))
    code = _GUARD.format(conditions=" and ".join(["noted", *absent]), slot=slot.name)
    edits = before_statement(view, function, start, code, f"{OP}/{_VARIANT}")
    return replace(site, status=Status.ROUTED, variant=_VARIANT, edits=edits, slots=(slot,))


def _assignments(nodes: Iterable[ast.AST], name: str) -> list[ast.Assign]:
    """The assignments to a name inside these nodes, the outer ones first."""
    inner = (node for outer in nodes for node in walk_ast(outer))
    return [node for node in inner if isinstance(node, ast.Assign) and binding(node)[0] == name]
