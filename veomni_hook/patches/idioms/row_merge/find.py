"""Rows that are replaced at a mask: a kernel slot at the calls of ``masked_scatter``.

    x = x.masked_scatter(mask, source)  ->  x = slot.call(self, torch.Tensor.masked_scatter, x, mask, source)

Whether the mask is of rows depends on its shape, so kernels decide that at every call.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.tree import calls_in, in_text_order
from veomni_hook.patches.idioms.shared import check_self, check_torch, gathered
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "PART", "WORDS", "find"]

OP = "row_merge"
PART = "merge"
VARIANT = "rows"
WORDS = "masked_scatter"
CANDIDATES = "every method and function that calls masked_scatter or masked_scatter_ (part merge)"

_METHOD = "masked_scatter"
# Between the receiver of a call and its arguments.
_CALLED = re.compile(rf"\s*\.\s*{_METHOD}\s*\((?P<gap>\s*)")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, owner, function in view.every_function():
        if (calls := _calls(function)) and owner is not None:
            ordered = in_text_order(calls)
            edits, reasons = gathered(ordered, partial(_edit, view, function))
            reason = Reason.joined(reasons)
            site = Site.asking(OP, target, VARIANT, ordered[0], edits, reason=reason, part=PART)
            yield site if edits else replace(site, status=Status.MISSED, variant="", slots=())
        elif calls:
            reason = Reason("a function, which belongs to no module", Code.NO_OWNER, calls[0].lineno)
            yield Site(OP, target, Status.MISSED, reason=reason, part=PART, lineno=calls[0].lineno)


def _calls(code: ast.AST) -> list[ast.Call]:
    names = (_METHOD, f"{_METHOD}_")
    return [call for call in calls_in(code) if getattr(call.func, "attr", "") in names]


def _edit(view: ModuleView, method: FunctionNode, call: ast.Call) -> Edit:
    """The edit that asks the slot at a call; raises `Missed` if there is none."""
    assert isinstance(call.func, ast.Attribute)  # noqa: S101
    if call.func.attr != _METHOD:
        raise Missed("masked_scatter_ changes a tensor in place", call, Code.IN_PLACE)
    check_self(method, call)
    if (
        call.keywords
        or len(call.args) != 2
        or any(isinstance(argument, ast.Starred) for argument in call.args)
    ):
        raise Missed("masked_scatter is not called with a mask and a source", call, Code.OTHER_ARGUMENTS)
    check_torch(view, method, call)
    document, receiver = view.document, call.func.value
    if _calls(receiver):
        raise Missed("it is called on the result of another masked_scatter", call, Code.NO_ROOM)
    called = _CALLED.match(document.source, document.end(receiver))
    if called is None:
        raise Missed("what it is called on is in brackets, or a comment follows it", call, Code.NO_ROOM)
    gap = called["gap"]  # arguments on lines of their own stay there
    added = f"self, torch.Tensor.{_METHOD}, {view.text(receiver)}"
    text = f"{slot_name(OP, VARIANT)}.call({gap}{added},{gap or ' '}"
    return Edit(document.start(receiver), called.end(), text)
