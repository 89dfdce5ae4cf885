"""Masks that the host reads once: padding masks, and masks of sounds, from which their lengths follow.

    padding_mask is None or padding_mask.all()       ->  ... veomni_host.values(padding_mask).all()
    mask = mask.to(device=device, dtype=torch.bool)  ->  mask = veomni_host.converted(mask, mask.to(...))
    torch.sum(mask, dim=1)   ->  veomni_host.followed(lambda mask: torch.sum(mask, dim=1), mask)
    features[mask.bool()]    ->  features[veomni_host.chosen(mask)]

Upstream's code waits for the device at each question about a padding mask, and for each kind of layers anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import loaded, parameter_names, read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import calls_in, last_name, walk_ast
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.upstream_names import LENGTHS, names

__all__ = ["ASKS", "asks_of_positions", "of_lengths", "questions", "selections"]

#: What asks something of a mask.
ASKS = {"all", "any", "fast_all"}
CONVERTED = Template("MASK = MASK.to(*ARGUMENTS, **OPTIONS)")
SELECTED = Template("MASK.bool()", names="MASK")
_MASKS = (*names("mask"), *names("mask of padding"))


def asks_of_positions(function: FunctionNode) -> bool:
    """Whether a function takes positions alone, compares neighbours, and asks something of the result."""
    called = {last_name(node.func) for node in calls_in(function)}
    alone = parameter_names(function) == {*names("positions")}
    return alone and "diff" in called and not called.isdisjoint(ASKS)


def questions(view: ModuleView, function: FunctionNode) -> Iterator[Edit]:
    """Where a function asks something of one mask alone, such as ``torch.all(mask == 1)``, or converts it."""
    for call in calls_in(function):
        if last_name(call.func) in ASKS:
            masks = [name for name in walk_ast(call) if isinstance(name, ast.Name) and name.id in _MASKS]
            if len(masks) == 1:
                yield in_place(view, masks[0], f"veomni_host.values({masks[0].id})")
    for node in walk_ast(function):
        if isinstance(node, ast.Assign) and (match := CONVERTED.match(node)) and match["MASK"] in _MASKS:
            text = f"veomni_host.converted({match['MASK']}, {view.text(node.value)})"
            yield in_place(view, node.value, text)


def selections(view: ModuleView, method: FunctionNode) -> Iterator[Edit]:
    """Where a method sums a mask that it gets, or selects by it."""
    masks = {name for name in parameter_names(method) if "mask" in name}
    for node in walk_ast(method):
        if isinstance(node, ast.Subscript) and (selected := SELECTED.match(node.slice)):
            if selected["MASK"] in masks:
                yield in_place(view, node.slice, f"veomni_host.chosen({selected['MASK']})")
        elif isinstance(node, ast.Call) and last_name(node.func) == "sum":
            names = [name for name in loaded([node]) if name != "torch"]
            if len(names) == 1 and names[0] in masks:
                text = f"veomni_host.followed(lambda {names[0]}: {view.text(node)}, {names[0]})"
                yield in_place(view, node, text)


def of_lengths(method: FunctionNode) -> set[str]:
    """The locals of a method that hold lengths: results of a function of lengths."""
    holders: set[str] = set()
    for node in walk_ast(method):
        match node:
            case ast.Assign(value=ast.Call(func=function)) if last_name(function) == LENGTHS:
                holders = holders.union(*map(read_names, node.targets))
    return holders
