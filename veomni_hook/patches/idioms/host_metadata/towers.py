"""What towers compute from sizes themselves, as they did before transformers had vision_utils.

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
from veomni_hook.patches.code.tree import called_attributes, last_name, own_attribute, walk_ast
from veomni_hook.patches.idioms.host_metadata.binding import LIBRARIES, is_device, names_outside
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.upstream_names import ENDINGS

__all__ = ["boundaries", "is_alone", "repeats", "sent_values", "sizes_of"]

#: How a method reads sizes, all of them or the largest, besides a loop over them.
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


def sizes_of(method: FunctionNode) -> str:
    """The only argument of a method, if it is sizes; else empty."""
    if isinstance(method, ast.AsyncFunctionDef) or method.name == "forward":
        return ""
    names = [argument.arg for argument in method.args.args[1:]]
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
    nodes = [*walk_ast(method)]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == sizes]
    read = {node.iter for node in nodes if isinstance(node, ast.For)}
    read |= {match.expression("SIZES") for form in READS for match in map(form.match, nodes) if match}
    if not uses or not read.issuperset(uses):
        return []
    edits = [in_place(view, node, f"veomni_host.values({sizes})") for node in uses]
    indices = {getattr(node.slice, "id", "") for node in nodes if isinstance(node, ast.Subscript)}
    for node in nodes:
        if (joined := JOINED.match(node)) and joined["NAME"] in indices and isinstance(node, ast.Assign):
            text = f"veomni_host.sent({view.text(node.value)}, {sizes}.device)"
            edits.append(in_place(view, node.value, text))
        elif isinstance(node, ast.expr) and (replacement := _made(node)):
            edits.append(in_place(view, node, replacement))
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
        elif name and _of(value, lists | known) and (replacement := _made(value)):
            yield in_place(view, value, replacement)
            known.add(name)
        elif name and (used := _of(value, known)) and not _WAITING.isdisjoint(called_attributes(value)):
            arguments = ", ".join(used)
            yield in_place(
                view, value, f"veomni_host.of_sizes(lambda {arguments}: {view.text(value)}, {arguments})"
            )
            known.add(name)
        else:
            known.discard(name)


def repeats(view: ModuleView, forward: FunctionNode) -> list[Edit]:
    """Where a forward makes a tensor of a list that it gets, and repeats something as often as it says."""
    nodes, parameters = [*walk_ast(forward)], parameter_names(forward)
    remade = [match for match in map(REMADE.match, nodes) if match and match["LENGTHS"] in parameters]
    values = {match["LENGTHS"]: match.first.value for match in remade if isinstance(match.first, ast.Assign)}
    values = {name: value for name, value in values.items() if _made(value)}
    repeated = [match for match in map(REPEATED.match, nodes) if match and match["LENGTHS"] in values]
    edits = [in_place(view, value, _made(value)) for value in values.values() if repeated]
    for repetition in repeated:
        edits.append(
            in_place(view, repetition.expression("LENGTHS"), f"veomni_host.values({repetition['LENGTHS']})")
        )
    return edits


def _made(node: ast.expr) -> str:
    """``torch.tensor(values, device=...)`` without a wait; empty for other code."""
    match = MADE.match(node)
    return MADE_AT_ONCE.format_map(match) if match and "device=" in match["OPTIONS"] else ""


def _of(value: ast.expr, known: set[str]) -> list[str]:
    """The names of ``known`` in an expression of nothing but these; its device may be of another tensor."""
    names = names_outside(value, is_device)
    return sorted(names & known) if names <= known | LIBRARIES else []
