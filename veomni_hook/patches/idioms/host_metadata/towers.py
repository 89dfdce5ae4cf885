"""Towers that compute positions and boundaries from sizes themselves, before transformers had vision_utils.

    def get_window_index(self, grid_thw):        ->  below @veomni_host.computed()
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
from veomni_hook.patches.code.tree import called_attributes, chain, own_attribute, walk_ast
from veomni_hook.patches.idioms.host_metadata.binding import LIBRARIES, without_devices
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["SIZES", "boundaries", "of_sizes", "repeats", "sent_values", "sizes_of"]

#: How arguments end that hold sizes.
SIZES = "grid_thw"
#: What a forward makes of sizes that the host would wait for, or that the host reads later.
_WAITING = {"repeat_interleave", "unique_consecutive", "tolist", "pad", "cumsum"}


def sizes_of(method: FunctionNode) -> str:
    """The only argument of a method, if it is sizes; else empty."""
    if isinstance(method, ast.AsyncFunctionDef) or method.name == "forward":
        return ""
    names = [each.arg for each in method.args.args[1:]]
    rest = (method.args.vararg, method.args.kwarg, *method.args.kwonlyargs)
    return names[0] if len(names) == 1 and names[0].endswith(SIZES) and not any(rest) else ""


def of_sizes(method: FunctionNode, is_number: Callable[[str], bool]) -> bool:
    """Whether a method computes with its argument and numbers of ``self`` alone, and names no device."""
    for node in walk_ast(method):
        if (name := own_attribute(node)) and not is_number(name):
            return False
        if isinstance(node, ast.Attribute) and node.attr == "device":
            return False
        if isinstance(node, ast.keyword) and node.arg == "device":
            return False
    return True


def sent_values(view: ModuleView, method: FunctionNode, sizes: str) -> list[Edit]:
    """What reads sizes in a method, reads them on the host; what it computes there goes to the device.

    Empty if the method uses sizes in a way that is not known to read them.
    """
    uses = [each for each in walk_ast(method) if isinstance(each, ast.Name) and each.id == sizes]
    read = {id(each) for each in _read(method, sizes)}
    if not uses or any(id(each) not in read for each in uses):
        return []
    edits = [in_place(view, each, f"veomni_host.values({sizes})") for each in uses]
    indices = {
        node.slice.id
        for node in walk_ast(method)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name)
    }
    for node in walk_ast(method):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as value) if (
                name in indices and chain(value.func) == "torch.cat"
            ):
                text = f"veomni_host.sent({view.text(value)}, {sizes}.device)"
                edits.append(in_place(view, value, text))
            case ast.Call() if made := _made(view, node):
                edits.append(in_place(view, node, made))
    return edits


def boundaries(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode) -> Iterator[Edit]:
    """Statements of a forward that compute with sizes alone, or with what the others made of them."""
    known = {name for name in parameter_names(forward) if name.endswith(SIZES)}
    if local_names(forward) & LIBRARIES:
        return
    lists: set[str] = set()
    methods = view.methods(owner)
    for statement in forward.body if known else ():
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target, value = statement.targets[0], statement.value
        name = target.id if isinstance(target, ast.Name) else ""
        if _calls_method(value, known, methods):
            lists |= read_names(target)
        elif name and _of(value, lists | known) and (made := _made(view, value)):
            yield in_place(view, value, made)
            known.add(name)
        elif name and (used := _of(value, known)) and not _WAITING.isdisjoint(called_attributes(value)):
            given = ", ".join(used)
            yield in_place(view, value, f"veomni_host.of_sizes(lambda {given}: {view.text(value)}, {given})")
            known.add(name)
        elif name in known:
            known.discard(name)


def repeats(view: ModuleView, forward: FunctionNode) -> list[Edit]:
    """Where a forward makes a tensor of a list that it gets, and repeats something as often as it says."""
    given = parameter_names(forward)
    made: dict[str, Edit] = {}
    found: list[Edit] = []
    for node in walk_ast(forward):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in given and (
                text := _made(view, value)
            ).startswith(f"veomni_host.made({name},"):
                made[name] = in_place(view, value, text)
    for node in walk_ast(forward):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="repeat"), args=[ast.Subscript(value=ast.Name(id=name) as whole)]
            ) if name in made:
                found.append(in_place(view, whole, f"veomni_host.values({name})"))
    return [*made.values(), *found] if found else []


def _read(method: FunctionNode, sizes: str) -> Iterator[ast.Name]:
    """Where a method reads sizes: all of them, one after the other, or the largest."""
    for node in walk_ast(method):
        match node:
            case (
                ast.Call(func=ast.Attribute(value=ast.Name() as found, attr="tolist"))
                | ast.For(iter=ast.Name() as found)
                | ast.Call(func=ast.Attribute(value=ast.Subscript(value=ast.Name() as found), attr="max"))
            ) if found.id == sizes:
                yield found


def _made(view: ModuleView, node: ast.expr) -> str:
    """``torch.tensor(values, device=...)`` without a wait; empty for other code."""
    match node:
        case ast.Call(func=function, args=[ast.Name(id=name)], keywords=keywords) if chain(
            function
        ) == "torch.tensor" and any(each.arg == "device" for each in keywords):
            options = ", ".join(f"{each.arg}={view.text(each.value)}" for each in keywords if each.arg)
            return f"veomni_host.made({name}, {options})" if all(each.arg for each in keywords) else ""
    return ""


def _calls_method(value: ast.expr, known: set[str], methods: dict[str, FunctionNode]) -> bool:
    match value:
        case ast.Call(func=function, args=[ast.Name(id=name)], keywords=[]) if name in known:
            method = methods.get(own_attribute(function))
            return method is not None and bool(sizes_of(method))
    return False


def _of(value: ast.expr, known: set[str]) -> list[str]:
    """The names of ``known`` in an expression of nothing but these; its device may be of another tensor."""
    names = {each.id for each in without_devices(value) if isinstance(each, ast.Name)}
    return sorted(names & known) if names <= known | LIBRARIES else []
