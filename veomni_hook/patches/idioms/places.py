"""Places where code asks for a kernel: what must hold there, what several get, and uses of functions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import local_names, own_names
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, SlotSpec, Status

__all__ = ["at_use", "check_self", "check_torch", "gathered", "has_receiver", "has_self"]

_Place = TypeVar("_Place")
_Result = TypeVar("_Result")


def has_self(function: FunctionNode) -> bool:
    """Whether the first parameter of a function is ``self``."""
    return bool(function.args.args) and function.args.args[0].arg == "self"


def has_receiver(function: FunctionNode) -> bool:
    """Whether a method has parameters, all with names for callers; searches take the first for ``self``."""
    return bool(function.args.args) and not function.args.posonlyargs


def check_self(function: FunctionNode, place: object = None) -> None:
    """Raise `Missed`, with the line of ``place``, unless ``self`` is the module everywhere in a function."""
    if not has_self(function) or "self" in own_names(function.body):
        raise Missed("self is not the method's module", place, Code.REPLACED)


def check_torch(view: ModuleView, function: FunctionNode, place: object = None) -> None:
    """Raise `Missed`, with the line of ``place``, unless ``torch`` is torch in a function."""
    if view.scope.resolve("torch") != "torch" or "torch" in local_names(function):
        raise Missed("torch has another name here", place, Code.REPLACED)


def gathered(
    places: Iterable[_Place], route: Callable[[_Place], _Result]
) -> tuple[list[_Result], list[Reason]]:
    """What ``route`` returns for the places that it can route, and why it raises `Missed` for the others."""
    results, reasons = [], []
    for place in places:
        try:
            results.append(route(place))
        except Missed as missed:
            reasons.append(missed.reason)
    return results, reasons


def at_use(
    view: ModuleView, slot: SlotSpec, where: str, node: ast.expr, owner: str, why: str, **more: Any
) -> Site:
    """The site of a use of a function, which belongs to a candidate: ``slot`` stands in its place.

    Args:
        view: the module.
        slot: the function's slot.
        where: what has the use.
        node: the use.
        owner: the name of the module there; empty if there is none, or the code is not what ``node`` says.
        why: the reason then.
        more: other fields of the site.
    """
    site = Site(slot.op, where, Status.UNBOUND, slot.variant, why, counted=False, lineno=node.lineno, **more)
    if not owner:
        return site
    edit = in_place(view, node, f"{slot.name}.at({owner}, {ast.unparse(node)})")
    return replace(site, status=Status.ROUTED, reason="", edits=(edit,), slots=(slot,))
