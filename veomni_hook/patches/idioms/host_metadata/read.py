"""Which code computes with sizes alone, and where methods read sizes."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import local_names, parameter_names, read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    bound_once,
    calls_in,
    chain,
    in_text_order,
    own_attribute,
    walk_ast,
)
from veomni_hook.patches.idioms.host_metadata.binding import device_of
from veomni_hook.patches.idioms.host_metadata.sounds import of_lengths
from veomni_hook.patches.idioms.host_metadata.towers import SIZES
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed

__all__ = [
    "POSITIONS",
    "is_number",
    "position_arguments",
    "precomputed_names",
    "read",
    "reads_in",
    "state_of",
]

#: The method that computes positions in three dimensions.
POSITIONS = "get_rope_index"
#: How a function takes a precomputed result.
TAKEN = Template("kwargs.pop(NAME, *DEFAULT)")
#: Where upstream makes a tensor of an argument.
MADE = Template("torch.as_tensor(SIZE, device=DEVICE)", names="SIZE")
#: How arguments end from which sizes are read.
_READ = (SIZES, "feature_attention_mask")
#: How names of attributes end that hold numbers.
_NUMBERS = ("_size", "_unit", "_factor", "_ratio")


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
    if attribute.endswith(_NUMBERS) or attribute == "config":
        return True
    return attribute not in view.inherited_methods(owner) and _is_configured(view, attribute)


def _is_configured(view: ModuleView, attribute: str) -> bool:
    """Whether every class of the file that assigns an attribute assigns a part of the configuration."""
    assigned = view.assigned.get(attribute, ())
    return bool(assigned) and all(chain(value).startswith(("config.", "self.config.")) for value in assigned)


def reads_in(method: FunctionNode) -> list[ast.Call]:
    """The calls of ``tolist`` and ``item`` in a method, in text order."""
    return in_text_order(
        call
        for call in calls_in(method)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("tolist", "item")
    )


def read(method: FunctionNode, call: ast.Call) -> tuple[ast.Name, ast.expr | None]:
    """The argument that a call of `reads_in` reads, with the device where upstream makes a tensor of it.

    Raises:
        Missed: it does not follow from one argument and numbers alone.
    """
    assert isinstance(call.func, ast.Attribute)  # noqa: S101 - see `reads_in`
    value, what = call.func.value, f"what {call.func.attr} reads"
    made = [found for found in map(MADE.match, walk_ast(value)) if found]
    sent = {found.expression("SIZE"): found.expression("DEVICE") for found in made}
    sent = {size: device for size, device in sent.items() if device_of(device)}
    apart = {node for device in sent.values() for node in walk_ast(device)}
    names = [node for node in walk_ast(value) if isinstance(node, ast.Name) and node not in apart]
    given, lengths = parameter_names(method), of_lengths(method)
    numbers = {name for name, bound in bound_once(walk_ast(method)).items() if _is_of_numbers(bound)}
    sizes = [node for node in names if node.id in (given | lengths) - {"self"}]
    if others := [node.id for node in names if node.id in local_names(method) - given - lengths - numbers]:
        raise Missed(
            f"{what} follows from what the method computes ({', '.join(others)})", call, Code.READS_VALUES
        )
    if len(sizes) != 1:
        raise Missed(f"{what} follows from several arguments, or none", call, Code.READS_VALUES)
    if not all(map(_is_own_number, _own_values(value))):
        raise Missed(f"{what} may follow from a tensor of self", call, Code.READS_VALUES)
    return sizes[0], sent.get(sizes[0])


def _is_of_numbers(value: ast.expr) -> bool:
    """``self.tower.merge_kernel_size[0] * self.tower.merge_kernel_size[1]``"""
    forms = (ast.BinOp, ast.Subscript, ast.Constant, ast.Attribute, ast.Name)
    own = _own_values(value)
    return (
        bool(own)
        and all(map(_is_own_number, own))
        and read_names(value) == {"self"}
        and all(isinstance(node, forms) for node in walk_ast(value))
    )


def _own_values(value: ast.expr) -> list[str]:
    """``self.tower.size`` for what an expression reads of ``self``, each as a whole."""
    attributes = [node for node in walk_ast(value) if isinstance(node, ast.Attribute)]
    parts = {node.value for node in attributes}
    whole = [chain(node) for node in attributes if node not in parts]
    return [text for text in whole if text.startswith("self.")]


def _is_own_number(text: str) -> bool:
    """Whether what is read of ``self`` is a part of the configuration, or named after a number."""
    return ".config." in text or text.endswith(_NUMBERS)


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
    sizes = [name for name in order if name.endswith(_READ)]
    seconds = [name for name in order if "second_per_grid" in name]
    positions = [name for name in order if name not in sizes and (name in taken or name in seconds)]
    return (sizes, positions) if taken & set(sizes) else None
