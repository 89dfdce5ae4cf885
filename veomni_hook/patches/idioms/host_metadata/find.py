"""What models compute from the sizes of images, videos and sounds: on the host, from one copy of the sizes.

Forms, none of which asks for a kernel; `veomni_hook.multimodal.host` is what the inserted code calls:

* a function that takes a precomputed result from its argument ``kwargs``: ``@veomni_host.computed("name")``;
* a method ``get_rope_index``, if it reads nothing but its arguments and the configuration: the same;
* ``sizes.prod(-1).tolist()`` of an argument: ``veomni_host.values(sizes).prod(-1).tolist()``;
* ``torch.as_tensor(sizes, device=features.device)`` that is read: ``sizes`` are on the host from the method's
  begin, and the device is ``veomni_host.place(features.device)``;
* lengths of sounds that follow from a mask, and questions about padding masks (`masks`);
* functions of lengths of sounds: ``@veomni_host.lengths``;
* what a tower computes from sizes itself (`towers`), or from lengths of sounds (`lengths`);
* a forward of a class with ``get_rope_index``: it reads at once what the others need;
* positions that a forward counts, ``torch.arange(length, device=device) + start``: the host knows them;
* a function that asks something of positions alone (``find_packed_sequence_indices``): it runs on the host
  where positions are known there.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import local_names, parameter_names, read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import bound_once, calls_in, chain, in_text_order, own_attribute, walk_ast
from veomni_hook.patches.idioms.host_metadata.binding import device_of
from veomni_hook.patches.idioms.host_metadata.lengths import computed
from veomni_hook.patches.idioms.host_metadata.masks import (
    ASKS,
    asks_of_positions,
    of_lengths,
    questions,
    selections,
)
from veomni_hook.patches.idioms.host_metadata.towers import (
    boundaries,
    is_alone,
    repeats,
    sent_values,
    sizes_of,
)
from veomni_hook.patches.routes.guards import before_body, before_statement, in_place, tuple_of
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, Status
from veomni_hook.patches.upstream_names import ENDINGS, LENGTHS, POSITIONS, SECONDS

__all__ = ["CANDIDATES", "OP", "WORDS", "find", "precomputed_names"]

OP = "host_metadata"
WORDS = ""
CANDIDATES = (
    "every function that takes precomputed results from its argument kwargs, every method named"
    " get_rope_index, every method named get_*_features that calls tolist or item or selects by a mask, and"
    " every function of lengths of sounds (_get_feat_extract_output_lengths) beside get_audio_features"
)
_site = partial(Site.calling, OP, used=("veomni_hook.multimodal", "host as veomni_host"))
#: How a function takes a precomputed result.
TAKEN = Template("kwargs.pop(NAME, *DEFAULT)")
#: Where upstream makes a tensor of an argument.
PLACED = Template("torch.as_tensor(SIZE, device=DEVICE)", names="SIZE")
COUNTED = Template("POSITIONS = torch.arange(LENGTH, device=DEVICE) + START", names="START")
_COUNTED_INSIDE = Template("(POSITIONS := torch.arange(LENGTH, device=DEVICE) + START)")
_COMPUTED, _READ = "computed_on_host", "read_once"
_SIZES, _LENS = ENDINGS["sizes"], ENDINGS["lengths"]


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module, the forwards that read for them, and what reads padding masks."""
    text = view.document.source
    if any(name in text for name in ("kwargs.pop(", POSITIONS, "_features", *_SIZES, *_LENS)):
        yield from _of_sizes(view, text)
    for owner, forward in view.forwards() if "torch.arange(" in text else ():
        if edits := [*_counted(view, forward)]:
            yield _site(f"{owner.name}.forward", "positions_counted", forward, edits, counted=False)
        elif any(map(_COUNTED_INSIDE.match, walk_ast(forward))):
            reason = Reason("its positions are counted inside of a statement", Code.OTHER_FORM)
            target = f"{owner.name}.forward"
            yield Site(OP, target, Status.MISSED, reason=reason, counted=False, lineno=forward.lineno)
    if not any(f"{name}(" in text for name in ASKS):
        return
    for definition in view.document.definitions():
        node = definition.node
        if isinstance(node, FunctionNode) and "mask" in node.name and (edits := [*questions(view, node)]):
            yield _site(definition.qualname, "mask_known", node, edits, counted=False)
    for name, function in view.functions.items():
        if asks_of_positions(function):
            decorator = "computed(floats=True, known=True)"
            yield _decorated(view, name, function, decorator, "positions_known", counted=False)


def _counted(view: ModuleView, function: FunctionNode) -> Iterator[Edit]:
    for node in walk_ast(function):
        for statement, following in pairwise(node.body if isinstance(node, ast.If) else ()):
            if (match := COUNTED.match(statement)) and view.document.begins_line(following):
                text = f"veomni_host.counted({match['POSITIONS']}, {match['START']})"
                yield from before_statement(view, function, following, text, "the host knows the positions")


def _of_sizes(view: ModuleView, text: str) -> Iterator[Site]:
    for name, function in view.functions.items():
        if names := precomputed_names(function):
            arguments = ", ".join(f'"{name}"' for name in names)
            yield _decorated(view, name, function, f"computed({arguments})", _COMPUTED)
    for definition in view.document.definitions() if "def get_audio_features" in text else ():
        if isinstance(definition.node, FunctionNode) and definition.node.name == LENGTHS:
            yield _decorated(view, definition.qualname, definition.node, "lengths", "lengths_followed")
    for owner in view.classes.values():
        yield from _of_class(view, owner)


def precomputed_names(function: FunctionNode) -> list[str]:
    """The results that a function takes from its argument ``kwargs``: ``kwargs.pop("name", None)``."""
    named = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    if "kwargs" not in named or len(parameter_names(function)) < 2:
        return []
    taken = [match.expression("NAME") for match in filter(None, map(TAKEN.match, walk_ast(function)))]
    return [name.value for name in taken if isinstance(name, ast.Constant) and isinstance(name.value, str)]


def _of_class(view: ModuleView, owner: ast.ClassDef) -> Iterator[Site]:
    methods, numbers = view.methods(owner), partial(_is_number, view, owner)
    for name, method in methods.items():
        target = f"{owner.name}.{name}"
        if name == POSITIONS:
            if state := _state_of(view, owner, method):
                yield _missed(target, f"it reads or changes self.{state}", method)
            else:
                yield _decorated(view, target, method, "computed(floats=True)", _COMPUTED)
        elif name.startswith("get_") and name.endswith("_features"):
            yield from _features(view, target, method, numbers)
    yield from _tower(view, owner, methods, numbers)
    if "forward" in methods:
        yield from _read_together(view, owner, methods["forward"])


def _state_of(view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> str:
    """The first attribute of ``self`` that may hold a tensor and that a method uses; empty if none does.

    Methods that it calls are followed in the class; other classes of the file must not assign the attribute
    anything but a part of the configuration.
    """
    used = view.attributes_used(owner, method)
    return next((name for name in used if not _is_configured(view, name)), "")


def _is_number(view: ModuleView, owner: ast.ClassDef, attribute: str) -> bool:
    """Whether an attribute is a number of the configuration."""
    if attribute.endswith(ENDINGS["numbers"]) or attribute == "config":
        return True
    return attribute not in view.inherited_methods(owner) and _is_configured(view, attribute)


def _is_configured(view: ModuleView, attribute: str) -> bool:
    """Whether every class of the file that assigns an attribute assigns a part of the configuration."""
    assigned = view.assigned.get(attribute, ())
    return bool(assigned) and all(chain(value).startswith(("config.", "self.config.")) for value in assigned)


def _decorated(
    view: ModuleView, target: str, function: FunctionNode, decorator: str, variant: str, **more: Any
) -> Site:
    """A function with a decorator of ours, below all others."""
    if not view.document.begins_line(function):
        return _missed(target, "its def does not begin a line", function)
    # The edit is inside the definition, whose text is compared with upstream's otherwise.
    start = view.document.start(function)
    first = "async" if isinstance(function, ast.AsyncFunctionDef) else "def"
    text = f"@veomni_host.{decorator}\n{view.document.indent(function)}{first}"
    return _site(target, variant, function, [Edit(start, start + len(first), text)], **more)


def _missed(target: str, reason: str, line: FunctionNode | ast.expr) -> Site:
    return Site(OP, target, Status.MISSED, reason=Reason(reason, Code.READS_VALUES), lineno=line.lineno)


def _features(
    view: ModuleView, target: str, method: FunctionNode, numbers: Callable[[str], bool]
) -> Iterator[Site]:
    """The sites of a method that computes features and reads sizes."""
    sizes = {name for name in parameter_names(method) if name.endswith(_SIZES)}
    edits_of = computed(view, {method.name: method}, method.name, sizes, numbers)
    edits = [*selections(view, method), *edits_of.get(method.name, ())]
    read_once: list[Edit] = []
    # By name; whether upstream sends it to a device, which may be any, so that the tower reads it there, too.
    sent: dict[str, bool] = {}
    called = (call.func for call in calls_in(method) if isinstance(call.func, ast.Attribute))
    for place in in_text_order(function for function in called if function.attr in ("tolist", "item")):
        try:
            size, device = _read(method, place)
        except Missed as missed:
            yield _missed(target, missed.reason, place)
            return
        sent[size.id] = sent.get(size.id, False) or device is not None
        text = f"values({size.id})" if device is None else f"place({ast.unparse(device)})"
        read_once.append(in_place(view, device or size, f"veomni_host.{text}"))
    for name in (name for name, to_device in sent.items() if to_device):
        read_once += before_body(view, method, f"{name} = veomni_host.values({name})", "sizes are read once")
    # Others may have replaced the code around it.
    edits += [one for one in read_once if not any(e.start <= one.start and one.end <= e.end for e in edits)]
    if edits:
        yield _site(target, _READ, method, edits, captures={"sizes": ", ".join(sent)})


def _read(method: FunctionNode, place: ast.Attribute) -> tuple[ast.Name, ast.expr | None]:
    """The argument that is read in one place, with the device where upstream makes a tensor of it.

    Raises:
        Missed: it does not follow from one argument and numbers alone.
    """
    value, what = place.value, f"what {place.attr} reads"
    placed = [match for match in map(PLACED.match, walk_ast(value)) if match]
    devices = {match.expression("SIZE"): match.expression("DEVICE") for match in placed}
    devices = {size: device for size, device in devices.items() if device_of(device)}
    apart = {node for device in devices.values() for node in walk_ast(device)}
    names = [node for node in walk_ast(value) if isinstance(node, ast.Name) and node not in apart]
    arguments, bound = parameter_names(method) | of_lengths(method), bound_once(walk_ast(method))
    numbers = {name for name in bound if read_names(bound[name]) == {"self"} and _has_numbers(bound[name])}
    sizes = [node for node in names if node.id in arguments - {"self"}]
    others = ", ".join(node.id for node in names if node.id in local_names(method) - arguments - numbers)
    for fails, reason in (
        (others, f"follows from what the method computes ({others})"),
        (len(sizes) != 1, "follows from several arguments, or none"),
        (not _has_numbers(value), "may follow from a tensor of self"),
    ):
        if fails:
            raise Missed(f"{what} {reason}", place, Code.READS_VALUES)
    return sizes[0], devices.get(sizes[0])


def _has_numbers(value: ast.expr) -> bool:
    """Whether all that an expression has of ``self`` is of the configuration, or named after a number."""
    attributes = [node for node in walk_ast(value) if isinstance(node, ast.Attribute)]
    parts = {node.value for node in attributes}
    own = (text for node in attributes if node not in parts and (text := chain(node)).startswith("self."))
    return all(".config." in text or text.endswith(ENDINGS["numbers"]) for text in own)


def _tower(
    view: ModuleView, owner: ast.ClassDef, methods: dict[str, FunctionNode], numbers: Callable[[str], bool]
) -> Iterator[Site]:
    """What a tower computes from sizes, or from lengths of sounds, itself."""
    for name, method in methods.items():
        sizes, target = sizes_of(method), f"{owner.name}.{name}"
        if sizes and is_alone(method, numbers):
            yield _decorated(view, target, method, "computed()", _COMPUTED, counted=False)
        elif sizes and (edits := sent_values(view, method, sizes)):
            yield _site(target, _READ, method, edits, counted=False)
    if (forward := methods.get("forward")) is None:
        return
    lengths = {name for name in parameter_names(forward) if name.endswith(_LENS)}
    written = [*computed(view, methods, "forward", lengths, numbers).items()]
    for name, edits in (*written, ("forward", [*boundaries(view, owner, forward), *repeats(view, forward)])):
        if edits:
            yield _site(f"{owner.name}.{name}", _COMPUTED, methods[name], edits, counted=False)


def _read_together(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode) -> Iterator[Site]:
    """A forward with positions from ``get_rope_index``: it reads at once the sizes that this takes.

    What else positions follow from is read with them, if positions are not given.
    """
    index = view.inherited_methods(owner).get(POSITIONS)
    if index is None or "position_ids" not in parameter_names(forward) or _state_of(view, owner, index):
        return
    taken = {argument.arg for argument in index.args.args[1:]}
    for method in (forward, *view.helpers(owner, forward).values()):
        calls = (call for call in calls_in(method) if own_attribute(call.func) == POSITIONS)
        taken = taken.union(*map(read_names, calls))
    order = [argument.arg for argument in forward.args.args[1:]]
    sizes = [name for name in order if name.endswith(_SIZES + ENDINGS["masks of sounds"])]
    seconds = [name for name in order if SECONDS in name]
    positions = [name for name in order if name not in sizes and (name in taken or name in seconds)]
    if taken.isdisjoint(sizes):
        return
    others = f", {tuple_of(positions)} if position_ids is None else (position_ids,)" if positions else ""
    asked = f"veomni_host.read_together({tuple_of(sizes)}{others})"
    edits = (*before_body(view, forward, asked, "sizes are read at once"), *selections(view, forward))
    yield _site(f"{owner.name}.forward", "read_together", forward, edits, counted=False)
