"""Where transformers asks whether a padding mask hides anything, and whether samples share a row.

The mask is copied to the host once:

    if padding_mask is None or padding_mask.all():  ->  ... veomni_host.values(padding_mask).all():
    mask = mask.to(device=device, dtype=torch.bool)  ->  mask = veomni_host.converted(mask, mask.to(...))

What computes with positions alone (``find_packed_sequence_indices``) runs on the host where positions are
known there: ``@veomni_host.computed(floats=True, known=True)``. Upstream's code waits for the device at each
question, and for each kind of layers anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import calls_in, last_name, walk_ast
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site
from veomni_hook.patches.upstream_names import names

__all__ = ["CANDIDATES", "OP", "find"]

OP = "host_metadata"
CANDIDATES = "nothing is counted: this is where padding masks and positions are read"

CONVERTED = Template("MASK = MASK.to(*ARGUMENTS, **OPTIONS)")
_IMPORT = ("veomni_hook.multimodal", "host as veomni_host")
_MASKS = (*names("mask"), *names("mask of padding"))
_POSITIONS = {*names("positions")}
_ASKS = {"all", "any", "fast_all"}


def find(view: ModuleView) -> Iterator[Site]:
    """The functions and methods with ``mask`` in their names that read a padding mask."""
    if not any(f"{name}(" in view.document.source for name in _ASKS):
        return
    for definition in view.document.definitions():
        node = definition.node
        if isinstance(node, FunctionNode) and "mask" in node.name:
            if edits := [*_read(view, node), *_converted(view, node)]:
                yield Site.calling(OP, definition.qualname, "mask_known", node, edits, _IMPORT, counted=False)
    for name, function in view.functions.items():
        if _asks_of_positions(function) and view.document.begins_line(function):
            start = view.document.start(function)
            edit = Edit(start, start + len("def"), "@veomni_host.computed(floats=True, known=True)\ndef")
            yield Site.calling(OP, name, "positions_known", function, [edit], _IMPORT, counted=False)


def _asks_of_positions(function: FunctionNode) -> bool:
    """Whether a function takes positions alone, compares neighbours, and asks something of the result."""
    called = {last_name(node.func) for node in calls_in(function)}
    return parameter_names(function) == _POSITIONS and "diff" in called and not called.isdisjoint(_ASKS)


def _read(view: ModuleView, function: FunctionNode) -> Iterator[Edit]:
    """``all(mask)``, ``mask.any()``, ``torch.all(mask == 1)``: of one mask alone."""
    for node in calls_in(function):
        if last_name(node.func) in _ASKS:
            masks = [each for each in walk_ast(node) if isinstance(each, ast.Name) and each.id in _MASKS]
            if len(masks) == 1:
                yield in_place(view, masks[0], f"veomni_host.values({masks[0].id})")


def _converted(view: ModuleView, function: FunctionNode) -> Iterator[Edit]:
    for node in walk_ast(function):
        if isinstance(node, ast.Assign) and (found := CONVERTED.match(node)) and found["MASK"] in _MASKS:
            text = f"veomni_host.converted({found['MASK']}, {view.text(node.value)})"
            yield in_place(view, node.value, text)
