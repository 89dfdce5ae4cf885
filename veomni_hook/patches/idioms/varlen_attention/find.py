"""Attention by segment: a guard in front of the statements that split query, key and value.

One call of a kernel replaces a call of the attention function for each segment. The guard stands where
upstream's condition has already excluded flash attention, so it never replaces what a user chose there; which
other function was chosen is an operand, and kernels check it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.code.template import Found
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.graph import receiver_name
from veomni_hook.patches.idioms.varlen_attention.read import read, weights_without_a_kernel
from veomni_hook.patches.routes.insertion import free_name
from veomni_hook.patches.routes.takeover import guard
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed, Site, Status
from veomni_hook.patches.slots import slot_name

__all__ = ["CANDIDATES", "OP", "VARIANT", "find"]

OP = "varlen_attention"
VARIANT = "full"
CANDIDATES = (
    "every method with a parameter whose name contains cu_seqlens that looks an attention function up"
    " (get_interface)"
)

_BOUNDARIES = "cu_seqlens"
_LOOK_UP = "get_interface"
_TENSORS = ("QUERY", "KEY", "VALUE", "CU_SEQLENS")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    text = view.document.source
    if _BOUNDARIES not in text or _LOOK_UP not in text:
        return
    for target, _, method in view.every_method():
        if any(_BOUNDARIES in each for each in parameter_names(method)) and _looks_up(method):
            yield _site(view, target, method)


def _looks_up(method: FunctionNode) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == _LOOK_UP for node in walk_ast(method))


def _site(view: ModuleView, target: str, method: FunctionNode) -> Site:
    try:
        if receiver_name(method) != "self":
            raise Missed("self is not the method's module")
        found = read(method)
        if found is None:
            raise Missed("it does not split query, key and value at the boundaries")
        run = Run(method, [*found.block], found.index, len(found.block) - 1)
        edits = guard(
            view,
            run,
            slot_name(OP, VARIANT),
            ["self", f"*{free_name(method, 'operands')}"],
            _answer(method, found),
            f"{OP}/{VARIANT}: one call for all segments",
            returns=False,
            before=_operands(method, found),
        )
        if edits is None:
            raise Missed("code after the segments reads more than the output", found.first)
    except Missed as missed:
        return Site(OP, target, Status.MISSED, reason=str(missed), lineno=method.lineno)
    captures = {name.lower(): found[name] for name in _TENSORS}
    return Site.asking(OP, target, VARIANT, found.first, edits, captures=captures)


def _operands(method: FunctionNode, found: Found) -> str:
    """The statement that collects the operands, which the condition and the call of the kernel use."""
    given = "".join(f"        {ast.unparse(each)},\n" for each in found.bound["OPTIONS"].nodes)
    tensors = ", ".join(found[name] for name in (*_TENSORS, "ATTEND"))
    options = f"    dict(\n{given}    ),\n" if given else "    {},\n"
    return f"{free_name(method, 'operands')} = (\n    {tensors},\n{options})\n"


def _answer(method: FunctionNode, found: Found) -> list[ast.stmt]:
    """The statements for the case that there is a kernel."""
    kernel, operands = free_name(method, "kernel"), free_name(method, "operands")
    output = f"{found['OUTPUT']} = {kernel}(*{operands})\n"
    return ast.parse(output + weights_without_a_kernel(found)).body
