"""Lengths of sounds, which follow from a mask of their features.

    lengths = torch.sum(mask, dim=1)     ->  veomni_host.followed(lambda mask: torch.sum(mask, dim=1), mask)
    features.permute(0, 2, 1)[mask.bool()]  ->  features.permute(0, 2, 1)[veomni_host.chosen(mask)]
    def _get_feat_extract_output_lengths(...)  ->  below @veomni_host.lengths

So everything that the host reads of a sound follows from one copy of the mask.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import loaded, parameter_names, read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import last_name, walk_ast
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["LENGTHS", "of_lengths", "selections"]

#: How functions are called that map lengths of sounds to lengths of features.
LENGTHS = "_get_feat_extract_output_lengths"
SELECTED = Template("MASK.bool()", names="MASK")


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
    found: set[str] = set()
    for node in walk_ast(method):
        match node:
            case ast.Assign(value=ast.Call(func=function)) if last_name(function) == LENGTHS:
                found = found.union(*map(read_names, node.targets))
    return found
