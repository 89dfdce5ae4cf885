"""What models compute from the sizes of images, videos and sounds: on the host, from one copy of the sizes.

Seven forms, none of which asks for a kernel; `veomni_hook.multimodal.host` is what the inserted code calls:

* a function that takes a precomputed result from its argument ``kwargs``: ``@veomni_host.computed("name")``;
* a method ``get_rope_index``, if it reads nothing but its arguments and the configuration: the same;
* ``sizes.prod(-1).tolist()`` of an argument: ``veomni_host.values(sizes).prod(-1).tolist()``;
* ``torch.as_tensor(sizes, device=features.device)`` that is read: ``sizes`` are on the host from the method's
  begin, and the device is ``veomni_host.place(features.device)``;
* lengths of sounds that follow from a mask (`sounds`);
* what a tower computes from sizes itself (`towers`), or from lengths of sounds (`lengths`);
* a forward of a class with ``get_rope_index``: it reads at once what the others need.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.idioms.host_metadata.lengths import computed_lengths, computed_sizes
from veomni_hook.patches.idioms.host_metadata.read import (
    POSITIONS,
    Reading,
    is_number,
    position_arguments,
    precomputed_names,
    readings,
    state_of,
)
from veomni_hook.patches.idioms.host_metadata.sounds import length_functions, selections
from veomni_hook.patches.idioms.host_metadata.towers import (
    SIZES,
    boundaries,
    of_sizes,
    repeats,
    sent_values,
    sizes_of,
)
from veomni_hook.patches.routes.guards import before_body, in_place, tuple_of
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "host_metadata"
CANDIDATES = (
    "every function that takes precomputed results from its argument kwargs, every method named"
    " get_rope_index, every method named get_*_features that calls tolist or item or selects by a mask, and"
    " every function of lengths of sounds (_get_feat_extract_output_lengths) beside get_audio_features"
)
_IMPORT = ("veomni_hook.multimodal", "host as veomni_host")
_FOLLOWED = "lengths_followed"
_COMPUTED, _READ, _TOGETHER = "computed_on_host", "read_once", "read_together"


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module, and the forwards that read for them."""
    text = view.document.source
    if not any(name in text for name in ("kwargs.pop(", POSITIONS, "_features", "grid_thw", "_lens")):
        return
    for name, function in view.functions.items():
        if names := precomputed_names(function):
            given = ", ".join(f'"{each}"' for each in names)
            yield _decorated(view, name, function, f"computed({given})", _COMPUTED)
    for definition in length_functions(view):
        assert isinstance(definition.node, FunctionNode)  # noqa: S101
        yield _decorated(view, definition.qualname, definition.node, "lengths", _FOLLOWED)
    for owner in view.classes.values():
        methods = view.methods(owner)
        for name, method in methods.items():
            if name == POSITIONS:
                state = state_of(view, owner, method)
                reason = f"it reads or changes self.{state}" if state else ""
                target = f"{owner.name}.{name}"
                yield _decorated(view, target, method, "computed(floats=True)", _COMPUTED, reason)
            elif name.startswith("get_") and name.endswith("_features"):
                numbers = partial(is_number, view, owner)
                yield from _features(view, f"{owner.name}.{name}", method, numbers)
        yield from _tower(view, owner, methods)
        if "forward" in methods and (arguments := position_arguments(view, owner, methods["forward"])):
            yield _forward(view, owner, methods["forward"], arguments)


def _decorated(
    view: ModuleView, target: str, function: FunctionNode, decorator: str, variant: str, reason: str = ""
) -> Site:
    """A function with a decorator of ours, below all others; missed for a ``reason``."""
    reason = reason or ("" if view.document.begins_line(function) else "its def does not begin a line")
    if reason:
        return Site(OP, target, Status.MISSED, reason=reason, lineno=function.lineno)
    # The edit is inside the definition, whose text is compared with upstream's otherwise.
    start = view.document.start(function)
    first = "async" if isinstance(function, ast.AsyncFunctionDef) else "def"
    text = f"@veomni_host.{decorator}\n{view.document.indent(function)}{first}"
    edits = [Edit(start, start + len(first), text)]
    return Site.calling(OP, target, variant, function, edits, _IMPORT)


def _features(
    view: ModuleView, target: str, method: FunctionNode, numbers: Callable[[str], bool]
) -> Iterator[Site]:
    """The sites of a method that computes features and reads sizes."""
    found: list[Reading] = list(readings(method))
    sizes = {name for name in parameter_names(method) if name.endswith(SIZES)}
    edits = [*selections(view, method), *(computed_sizes(view, method, sizes, numbers) if sizes else ())]
    if not found and not edits:
        return
    unknown = next((each for each in found if each.reason), None)
    if unknown is not None:
        yield Site(OP, target, Status.MISSED, reason=unknown.reason, lineno=unknown.lineno)
        return
    values = [edit for each in found for edit in _values(view, each)]
    # What upstream sends to a device may be anywhere: so the tower reads it on the host, too.
    anywhere = dict.fromkeys(
        each.size.id for each in found if each.size is not None and each.device is not None
    )
    for name in anywhere:
        values += before_body(view, method, f"{name} = veomni_host.values({name})", "sizes are read once")
    read = dict.fromkeys(each.size.id for each in found if each.size is not None)
    edits += _others(edits, values)
    yield Site.calling(OP, target, _READ, method, edits, _IMPORT, captures={"sizes": ", ".join(read)})


def _values(view: ModuleView, reading: Reading) -> Iterator[Edit]:
    """The argument's values on the host, or a tensor that is made of them there."""
    if reading.device is not None:
        yield in_place(view, reading.device, f"veomni_host.place({ast.unparse(reading.device)})")
    elif reading.size is not None:
        yield in_place(view, reading.size, f"veomni_host.values({reading.size.id})")


def _others(edits: list[Edit], more: list[Edit]) -> list[Edit]:
    """Those of ``more`` whose code none of ``edits`` replaces."""
    return [
        each for each in more if not any(edit.start <= each.start and each.end <= edit.end for edit in edits)
    ]


def _tower(view: ModuleView, owner: ast.ClassDef, methods: dict[str, FunctionNode]) -> Iterator[Site]:
    """What a tower computes from sizes itself."""
    for name, method in methods.items():
        target, sizes = f"{owner.name}.{name}", sizes_of(method)
        if sizes and of_sizes(method, partial(is_number, view, owner)):
            yield replace(_decorated(view, target, method, "computed()", _COMPUTED), counted=False)
        elif sizes and (edits := sent_values(view, method, sizes)):
            yield Site.calling(OP, target, _READ, method, edits, _IMPORT, counted=False)
    for name, edits in computed_lengths(view, methods, partial(is_number, view, owner)).items():
        target = f"{owner.name}.{name}"
        yield Site.calling(OP, target, _COMPUTED, methods[name], edits, _IMPORT, counted=False)
    forward = methods.get("forward")
    if forward is not None and (edits := [*boundaries(view, owner, forward), *repeats(view, forward)]):
        target = f"{owner.name}.forward"
        yield Site.calling(OP, target, _COMPUTED, forward, edits, _IMPORT, counted=False)


def _forward(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, arguments: tuple[list[str], list[str]]
) -> Site:
    """The forward pass that reads all sizes at once, before anything else."""
    sizes, positions = map(tuple_of, arguments)
    asked = f"veomni_host.read_together({sizes})"
    if arguments[1]:
        asked = f"{asked[:-1]}, {positions} if position_ids is None else (position_ids,))"
    edits = (*before_body(view, forward, asked, "sizes are read at once"), *selections(view, forward))
    return Site.calling(OP, f"{owner.name}.forward", _TOGETHER, forward, edits, _IMPORT, counted=False)
