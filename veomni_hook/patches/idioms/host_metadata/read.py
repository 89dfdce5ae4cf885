"""Which code computes with sizes alone, and where methods read sizes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import local_names, parameter_names, read_names
from veomni_hook.patches.code.tree import calls_in, chain, in_text_order, initialised, own_attribute, walk_ast
from veomni_hook.patches.idioms.host_metadata.sounds import of_lengths
from veomni_hook.patches.routes.view import ModuleView

__all__ = [
    "POSITIONS",
    "Reading",
    "is_number",
    "position_arguments",
    "precomputed_names",
    "readings",
    "state_of",
]

#: The method that computes positions in three dimensions.
POSITIONS = "get_rope_index"
_GIVEN = "kwargs"
_READS = ("tolist", "item")
#: How arguments end from which sizes are read, and what is in the names of those for seconds.
_SIZES, _SECONDS = ("grid_thw", "feature_attention_mask"), "second_per_grid"
#: How names of attributes end that hold numbers.
_NUMBERS = ("_size", "_unit", "_factor", "_ratio")


@dataclass(frozen=True, slots=True)
class Reading:
    """A place where the host reads a value: the argument that it follows from, or why that is unknown.

    Attributes:
        lineno: where it is.
        size: the argument.
        reason: why it is unknown.
        device: where upstream makes a tensor of the argument, ``features.device``.
    """

    lineno: int
    size: ast.Name | None = None
    reason: str = ""
    device: ast.expr | None = None


def precomputed_names(function: FunctionNode) -> list[str]:
    """The results that a function takes from its argument ``kwargs``: ``kwargs.pop("name", None)``."""
    if _GIVEN not in {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}:
        return []
    if len(parameter_names(function)) < 2:
        return []
    found = []
    for node in walk_ast(function):
        match node:
            case ast.Call(func=called, args=[ast.Constant(str(name)), *_]) if chain(called) == "kwargs.pop":
                found.append(name)
    return found


def state_of(view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> str:
    """The first attribute of ``self`` that may hold a tensor and that a method uses; empty if none does.

    Methods that it calls are followed in the class; other classes of the file must not assign the attribute
    anything but a part of the configuration.
    """
    methods = view.inherited_methods(owner)
    pending, seen = [method], {method.name}
    while pending:
        for node in walk_ast(pending.pop()):
            name = own_attribute(node)
            if not name or name in seen or name == "config":
                continue
            seen.add(name)
            if name in methods:
                pending.append(methods[name])
            elif not _is_configured(view, name):
                return name
    return ""


def is_number(view: ModuleView, owner: ast.ClassDef, attribute: str) -> bool:
    """Whether an attribute is a number of the configuration."""
    if attribute.endswith(_NUMBERS) or attribute == "config":
        return True
    return attribute not in view.inherited_methods(owner) and _is_configured(view, attribute)


def _is_configured(view: ModuleView, attribute: str) -> bool:
    """Whether every class of the file that assigns an attribute assigns a part of the configuration."""
    assigned = [
        value for owner in view.classes.values() for name, value in initialised(owner) if name == attribute
    ]
    return bool(assigned) and all(_of_config(value) for value in assigned)


def _of_config(value: ast.expr) -> bool:
    return chain(value).startswith(("config.", "self.config."))


def readings(method: FunctionNode) -> Iterator[Reading]:
    """Where a method calls ``tolist`` or ``item``, in text order."""
    arguments, local = parameter_names(method), local_names(method) - parameter_names(method)
    known, numbers = of_lengths(method), _numbers(method)
    for node in in_text_order(calls_in(method)):
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _READS:
            continue
        read, place = f"what {node.func.attr} reads", f"(line {node.lineno})"
        sent = _devices(node.func.value)
        devices = {id(each) for device in sent.values() for each in walk_ast(device)}
        names = [each for each in walk_ast(node.func.value) if isinstance(each, ast.Name)]
        names = [each for each in names if id(each) not in devices]
        sizes = [each for each in names if each.id in arguments | known and each.id != "self"]
        others = [each.id for each in names if each.id in local - known - numbers]
        if len(sizes) != 1 or others:
            made = (
                f"what the method computes ({', '.join(others)})" if others else "several arguments, or none"
            )
            yield Reading(node.lineno, reason=f"{read} follows from {made} {place}")
        elif any(map(_may_be_tensor, _whole_attributes(node.func.value))):
            yield Reading(node.lineno, reason=f"{read} may follow from a tensor of self {place}")
        else:
            yield Reading(node.lineno, sizes[0], device=sent.get(id(sizes[0])))


def _devices(value: ast.expr) -> dict[int, ast.expr]:
    """``features.device`` of ``torch.as_tensor(sizes, device=features.device)``, by the node of ``sizes``."""
    found: dict[int, ast.expr] = {}
    for node in walk_ast(value):
        match node:
            case ast.Call(
                args=[ast.Name() as size],
                keywords=[
                    ast.keyword(arg="device", value=ast.Attribute(value=ast.Name(), attr="device") as device)
                ],
            ) if chain(node.func) == "torch.as_tensor":
                found[id(size)] = device
    return found


def _numbers(method: FunctionNode) -> set[str]:
    """The locals of a method that are bound once, to what it computes from numbers of modules alone."""
    found: dict[str, list[ast.Assign]] = {}
    bound: list[str] = []
    for node in walk_ast(method):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.append(node.id)
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_of_numbers(value):
                found.setdefault(name, []).append(node)
    return {name for name in found if bound.count(name) == 1}


def _is_of_numbers(value: ast.expr) -> bool:
    """``self.tower.merge_kernel_size[0] * self.tower.merge_kernel_size[1]``"""
    nodes = list(walk_ast(value))
    forms = (ast.BinOp, ast.operator, ast.Subscript, ast.Constant, ast.Attribute, ast.Name, ast.expr_context)
    attributes = [*_whole_attributes(value)]
    return (
        bool(attributes)
        and all(isinstance(each, forms) for each in nodes)
        and all(each.id == "self" for each in nodes if isinstance(each, ast.Name))
        and not any(map(_may_be_tensor, attributes))
    )


def _whole_attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes in an expression that are not a part of a longer one."""
    inner = {id(each.value) for each in walk_ast(node) if isinstance(each, ast.Attribute)}
    for each in walk_ast(node):
        if isinstance(each, ast.Attribute) and id(each) not in inner:
            yield each


def _may_be_tensor(node: ast.AST) -> bool:
    """Whether an attribute of self is neither a part of the configuration nor named after a number."""
    text = chain(node) if isinstance(node, ast.Attribute) else ""
    if not text.startswith("self."):
        return False
    return ".config." not in text and not text.endswith(_NUMBERS)


def position_arguments(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode
) -> tuple[list[str], list[str]] | None:
    """The parameters of a forward that ``get_rope_index`` takes: sizes, and what positions follow from."""
    index = view.inherited_methods(owner).get(POSITIONS)
    given = parameter_names(forward)
    if index is None or "position_ids" not in given or state_of(view, owner, index):
        return None
    taken = {each.arg for each in index.args.args[1:]}
    methods = (forward, *view.helpers(owner, forward).values())
    calls = (call for method in methods for call in calls_in(method) if own_attribute(call.func) == POSITIONS)
    taken |= {name for call in calls for name in read_names(call)}
    order = [each.arg for each in forward.args.args[1:]]
    sizes = [name for name in order if name.endswith(_SIZES)]
    positions = [name for name in order if name not in sizes and (name in taken or _SECONDS in name)]
    return (sizes, positions) if taken & set(sizes) else None
