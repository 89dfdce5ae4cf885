"""Which code computes with sizes alone, where methods read sizes, and what towers compute from them.

Towers computed positions and boundaries themselves before transformers had vision_utils:

    get_window_index(self, grid_thw)             ->  below @veomni_host.computed()
    for t, h, w in grid_thw:                     ->  for t, h, w in veomni_host.values(grid_thw):
    pos_ids = torch.cat(pos_ids, dim=0)          ->  veomni_host.sent(torch.cat(...), grid_thw.device)
    torch.tensor(idx_list, device=device)        ->  veomni_host.made(idx_list, device=device)
    cu_seqlens = torch.repeat_interleave(...)    ->  veomni_host.of_sizes(lambda grid_thw: ..., grid_thw)
    width.repeat(lengths[i])                     ->  width.repeat(veomni_host.values(lengths)[i])

A method qualifies that takes sizes alone, and a forward whose statements compute with sizes alone. The last
form is that of forwards that make a tensor of a list of lengths.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import local_names, parameter_names, read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    bound_once,
    called_attributes,
    calls_in,
    chain,
    in_text_order,
    last_name,
    own_attribute,
    walk_ast,
)
from veomni_hook.patches.idioms.host_metadata.binding import LIBRARIES, device_of, is_device, names_outside
from veomni_hook.patches.idioms.host_metadata.masks import of_lengths
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed
from veomni_hook.patches.upstream_names import ENDINGS, POSITIONS, SECONDS

__all__ = [
    "boundaries",
    "is_number",
    "is_alone",
    "position_arguments",
    "precomputed_names",
    "read",
    "reads_in",
    "repeats",
    "sent_values",
    "sizes_of",
    "state_of",
]

#: How a function takes a precomputed result.
TAKEN = Template("kwargs.pop(NAME, *DEFAULT)")
#: Where upstream makes a tensor of an argument.
PLACED = Template("torch.as_tensor(SIZE, device=DEVICE)", names="SIZE")
#: How a method reads sizes, besides a loop over them.
READS = (
    Template("SIZES.tolist(*ARGUMENTS, **OPTIONS)", names="SIZES"),
    Template("SIZES[INDEX].max(*ARGUMENTS, **OPTIONS)", names="SIZES"),
)
JOINED = Template("NAME = torch.cat(*ARGUMENTS, **OPTIONS)")
#: A tensor of a list, and the same without a wait.
MADE = Template("torch.tensor(VALUES, **OPTIONS)", names="VALUES")
MADE_AT_ONCE = "veomni_host.made({VALUES}, {OPTIONS})"
CALLED = Template("self.METHOD(SIZES)", names="SIZES")
REMADE = Template("LENGTHS = torch.tensor(LENGTHS, **OPTIONS)")
REPEATED = Template("TENSOR.repeat(LENGTHS[INDEX])", names="LENGTHS")
#: What a forward makes of sizes that the host would wait for, or that the host reads later.
_WAITING = {"repeat_interleave", "unique_consecutive", "tolist", "pad", "cumsum"}
_SIZES = ENDINGS["sizes"]


def precomputed_names(function: FunctionNode) -> list[str]:
    """The results that a function takes from its argument ``kwargs``: ``kwargs.pop("name", None)``."""
    named = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
    if "kwargs" not in named or len(parameter_names(function)) < 2:
        return []
    taken = [found.expression("NAME") for found in filter(None, map(TAKEN.match, walk_ast(function)))]
    return [name.value for name in taken if isinstance(name, ast.Constant) and isinstance(name.value, str)]


def state_of(view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> str:
    """The first attribute of ``self`` that may hold a tensor and that a method uses; empty if none does.

    Methods that it calls are followed in the class; other classes of the file must not assign the attribute
    anything but a part of the configuration.
    """
    used = view.attributes_used(owner, method)
    return next((name for name in used if not _is_configured(view, name)), "")


def is_number(view: ModuleView, owner: ast.ClassDef, attribute: str) -> bool:
    """Whether an attribute is a number of the configuration."""
    if attribute.endswith(ENDINGS["numbers"]) or attribute == "config":
        return True
    return attribute not in view.inherited_methods(owner) and _is_configured(view, attribute)


def _is_configured(view: ModuleView, attribute: str) -> bool:
    """Whether every class of the file that assigns an attribute assigns a part of the configuration."""
    assigned = view.assigned.get(attribute, ())
    return bool(assigned) and all(chain(value).startswith(("config.", "self.config.")) for value in assigned)


def reads_in(method: FunctionNode) -> list[ast.Attribute]:
    """Where a method calls ``tolist`` and ``item``, in text order."""
    called = (call.func for call in calls_in(method) if isinstance(call.func, ast.Attribute))
    return in_text_order(function for function in called if function.attr in ("tolist", "item"))


def read(method: FunctionNode, place: ast.Attribute) -> tuple[ast.Name, ast.expr | None]:
    """The argument that is read in one place, with the device where upstream makes a tensor of it.

    Raises:
        Missed: it does not follow from one argument and numbers alone.
    """
    value, what = place.value, f"what {place.attr} reads"
    placed = [found for found in map(PLACED.match, walk_ast(value)) if found]
    devices = {found.expression("SIZE"): found.expression("DEVICE") for found in placed}
    devices = {size: device for size, device in devices.items() if device_of(device)}
    apart = {node for device in devices.values() for node in walk_ast(device)}
    names = [node for node in walk_ast(value) if isinstance(node, ast.Name) and node not in apart]
    given, bound = parameter_names(method) | of_lengths(method), bound_once(walk_ast(method))
    numbers = {name for name in bound if read_names(bound[name]) == {"self"} and _has_numbers(bound[name])}
    sizes = [node for node in names if node.id in given - {"self"}]
    others = ", ".join(node.id for node in names if node.id in local_names(method) - given - numbers)
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


def position_arguments(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode
) -> tuple[list[str], list[str]] | None:
    """The parameters of a forward that ``get_rope_index`` takes: sizes, and what positions follow from."""
    index = view.inherited_methods(owner).get(POSITIONS)
    if index is None or "position_ids" not in parameter_names(forward) or state_of(view, owner, index):
        return None
    taken = {each.arg for each in index.args.args[1:]}
    for method in (forward, *view.helpers(owner, forward).values()):
        calls = (call for call in calls_in(method) if own_attribute(call.func) == POSITIONS)
        taken = taken.union(*map(read_names, calls))
    order = [each.arg for each in forward.args.args[1:]]
    sizes = [name for name in order if name.endswith(_SIZES + ENDINGS["masks of sounds"])]
    seconds = [name for name in order if SECONDS in name]
    positions = [name for name in order if name not in sizes and (name in taken or name in seconds)]
    return (sizes, positions) if taken & set(sizes) else None


def sizes_of(method: FunctionNode) -> str:
    """The only argument of a method, if it is sizes; else empty."""
    if isinstance(method, ast.AsyncFunctionDef) or method.name == "forward":
        return ""
    names = [each.arg for each in method.args.args[1:]]
    rest = (method.args.vararg, method.args.kwarg, *method.args.kwonlyargs)
    return names[0] if len(names) == 1 and names[0].endswith(_SIZES) and not any(rest) else ""


def is_alone(method: FunctionNode, is_number: Callable[[str], bool]) -> bool:
    """Whether a method computes with its argument and numbers of ``self`` alone, and names no device."""
    nodes = [*walk_ast(method)]
    devices = any(is_device(node) or last_name(node) == "device" for node in nodes)
    return not devices and all(is_number(name) for name in map(own_attribute, nodes) if name)


def sent_values(view: ModuleView, method: FunctionNode, sizes: str) -> list[Edit]:
    """What reads sizes in a method, reads them on the host; what it computes there goes to the device.

    Empty if the method uses sizes in a way that is not known to read them.
    """
    uses = [node for node in walk_ast(method) if isinstance(node, ast.Name) and node.id == sizes]
    if not uses or not {*uses} <= {*_read(method)}:
        return []
    edits = [in_place(view, node, f"veomni_host.values({sizes})") for node in uses]
    indices = {getattr(node.slice, "id", "") for node in walk_ast(method) if isinstance(node, ast.Subscript)}
    for node in walk_ast(method):
        if (joined := JOINED.match(node)) and joined["NAME"] in indices and isinstance(node, ast.Assign):
            text = f"veomni_host.sent({view.text(node.value)}, {sizes}.device)"
            edits.append(in_place(view, node.value, text))
        elif isinstance(node, ast.expr) and (made := _made(node)):
            edits.append(in_place(view, node, made))
    return edits


def boundaries(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode) -> Iterator[Edit]:
    """Statements of a forward that compute with sizes alone, or with what the others made of them."""
    known = {name for name in parameter_names(forward) if name.endswith(_SIZES)}
    if not known or local_names(forward) & LIBRARIES:
        return
    lists, methods = set[str](), view.methods(owner)
    for statement in forward.body:
        match statement:
            case ast.Assign(targets=[target], value=value):
                name = getattr(target, "id", "")
            case _:
                continue
        called = CALLED.match(value)
        method = methods.get(called["METHOD"]) if called and called["SIZES"] in known else None
        if method is not None and sizes_of(method):
            lists |= read_names(target)
        elif name and _of(value, lists | known) and (made := _made(value)):
            yield in_place(view, value, made)
            known.add(name)
        elif name and (used := _of(value, known)) and not _WAITING.isdisjoint(called_attributes(value)):
            given = ", ".join(used)
            yield in_place(view, value, f"veomni_host.of_sizes(lambda {given}: {view.text(value)}, {given})")
            known.add(name)
        else:
            known.discard(name)


def repeats(view: ModuleView, forward: FunctionNode) -> list[Edit]:
    """Where a forward makes a tensor of a list that it gets, and repeats something as often as it says."""
    nodes, given = [*walk_ast(forward)], parameter_names(forward)
    remade = [found for found in map(REMADE.match, nodes) if found and found["LENGTHS"] in given]
    made = {found["LENGTHS"]: found.first.value for found in remade if isinstance(found.first, ast.Assign)}
    made = {name: value for name, value in made.items() if _made(value)}
    repeated = [found for found in map(REPEATED.match, nodes) if found and found["LENGTHS"] in made]
    edits = [in_place(view, value, _made(value)) for value in made.values() if repeated]
    for found in repeated:
        edits.append(in_place(view, found.expression("LENGTHS"), f"veomni_host.values({found['LENGTHS']})"))
    return edits


def _read(method: FunctionNode) -> Iterator[ast.expr]:
    """What a method reads: all of it, one after the other, or the largest."""
    for node in walk_ast(method):
        if isinstance(node, ast.For):
            yield node.iter
        for read in filter(None, (form.match(node) for form in READS)):
            yield read.expression("SIZES")


def _made(node: ast.expr) -> str:
    """``torch.tensor(values, device=...)`` without a wait; empty for other code."""
    made = MADE.match(node)
    return MADE_AT_ONCE.format_map(made) if made and "device=" in made["OPTIONS"] else ""


def _of(value: ast.expr, known: set[str]) -> list[str]:
    """The names of ``known`` in an expression of nothing but these; its device may be of another tensor."""
    names = names_outside(value, is_device)
    return sorted(names & known) if names <= known | LIBRARIES else []
