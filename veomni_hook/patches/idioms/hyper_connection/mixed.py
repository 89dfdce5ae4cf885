"""Mixed streams: an expression that adds the weighted output of a block to the mixture of its streams.

    MIXED  ->  kernel(post, ...) if (kernel := slot.kernel(self, post, ...)) is not None else MIXED

Its operands are names, so they can be read twice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import free_name
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import own_attribute, walk_ast
from veomni_hook.patches.idioms.hyper_connection.find import OP
from veomni_hook.patches.idioms.shared import check_self, check_torch
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "PART", "WORDS", "find"]

PART = "mix"
WORDS = "_hc( | hyper_connection("
CANDIDATES = (
    "every forward that unpacks the result of one of its own attributes whose name ends in _hc or"
    " hyper_connection (part mix)"
)

_VARIANT = "mix"
_ENDS = ("_hc", "hyper_connection")
#: In the order of the reference.
_OPERANDS = "POST COMB OUTPUT STREAMS DTYPE"
MIXED = Template(
    "POST.to(DTYPE).unsqueeze(-1) * OUTPUT.unsqueeze(-2)"
    " + torch.matmul(COMB.to(DTYPE).transpose(-1, -2), STREAMS)",
    names=_OPERANDS,
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for owner, forward in view.forwards():
        unpacked = [
            node.value
            for node in walk_ast(forward)
            if isinstance(node, ast.Assign) and [*map(type, node.targets)] == [ast.Tuple]
        ]
        callees = [value.func for value in unpacked if isinstance(value, ast.Call)]
        if any(own_attribute(callee).endswith(_ENDS) for callee in callees):
            target = f"{owner.name}.forward"
            try:
                yield _routed(view, target, forward)
            except Missed as missed:
                reason, lineno = missed.reason, forward.lineno
                yield Site(OP, target, Status.MISSED, reason=reason, part=PART, lineno=lineno)


def _routed(view: ModuleView, target: str, forward: FunctionNode) -> Site:
    check_self(forward)
    check_torch(view, forward)
    kernel, slot = free_name(forward, "kernel"), slot_name(OP, _VARIANT)
    edits = []
    for node in walk_ast(forward):
        if isinstance(node, ast.BinOp) and (mixed := MIXED.match(node)) is not None:
            operands = ", ".join(mixed[operand] for operand in _OPERANDS.split())
            text = (
                f"({kernel}({operands})\n"
                f"if ({kernel} := {slot}.kernel(self, {operands})) is not None\n"
                f"else {view.text(node)})"
            )
            edits.append(in_place(view, node, text))
    if not edits:
        raise Missed("nothing has the form of mixed streams plus a weighted output", code=Code.OTHER_FORM)
    return Site.asking(OP, target, _VARIANT, forward, edits, part=PART)
