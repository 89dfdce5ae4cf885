"""Calls of functions that transformers declares to be those of a package, in the methods of classes.

``@use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")`` above a function says that a
package's function of this name may run in its place. So its name there and its parameters say what it
computes, whatever the body looks like; tests compare the body with our formula.

Earlier releases import the package's function, or None, and hold one of both:
``self.rule = chunk_gated_delta_rule or torch_chunk_gated_delta_rule``. This says the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import own_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    calls_in,
    in_text_order,
    last_name,
    module_statements,
    own_attribute,
    walk_ast,
)
from veomni_hook.patches.graph import receiver_name
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView, initialised_by
from veomni_hook.patches.site import Code, Missed, Site, slot_name

__all__ = [
    "SEPARATION",
    "Declared",
    "added_boundaries",
    "calls_named",
    "check",
    "declared_as",
    "held",
    "of_package",
    "routed",
]

_DECORATOR = "use_kernel_func_from_hub_with_fallback"
_HELD = Template("PACKAGE or OWN")
#: What `added_boundaries` names, and the patched module imports.
SEPARATION = ("veomni_hook.kernels.shared", "separation as veomni_separation")


@dataclass(frozen=True)
class Declared:
    """A package's function.

    Attributes:
        name: its name in the package.
        parameters: those of upstream's function, except ``**kwargs``.
        boundaries: the keywords by which a call passes boundaries of samples.
    """

    name: str
    parameters: tuple[str, ...]
    boundaries: tuple[str, ...]


def calls_named(
    view: ModuleView, name: re.Pattern[str]
) -> Iterator[tuple[str, FunctionNode, list[ast.Call]]]:
    """The calls in each method of functions or attributes whose name has ``name`` in it.

    Yields:
        the method as ``Class.method``, its definition, and the calls in order.
    """
    if name.search(view.document.source) is None:
        return
    for target, _, method in view.every_method():
        if calls := [call for call in calls_in(method) if name.search(last_name(call.func))]:
            yield target, method, in_text_order(calls)


def check(
    view: ModuleView, target: str, method: FunctionNode, calls: list[ast.Call], wanted: Declared
) -> None:
    """Check that calls in a method are of upstream's function for ``wanted`` and pass boundaries.

    Raises:
        Missed: they are not.
    """
    if receiver_name(method) != "self" or "self" in own_names(method.body):
        raise Missed("self is not the method's module", code=Code.REPLACED)
    for call in calls:
        called, (function, packages) = last_name(call.func), _called(view, target, call)
        if function is None or view.scope.functions.get(function.name) is not function:
            raise Missed(f"{called} is not one function of the file", call, Code.REPLACED)
        if wanted.name not in packages:
            text = f"{called} is not declared as the {wanted.name} of a package"
            raise Missed(text, function, Code.DECORATED)
        if _parameters(function) != wanted.parameters or function.args.kwarg is None:
            raise Missed(f"{called} has other parameters", function, Code.OTHER_ARGUMENTS)
        passed = {keyword.arg for keyword in call.keywords}
        if None not in passed and passed.isdisjoint(wanted.boundaries):
            raise Missed("the call passes no boundaries of samples", call, Code.NO_BOUNDARIES)


def declared_as(view: ModuleView, target: str, calls: list[ast.Call], wanted: Mapping[str, Declared]) -> str:
    """Return which of ``wanted`` the first call's function is declared to be; the first key if none."""
    _, packages = _called(view, target, calls[0])
    keys = (key for key, declared in wanted.items() if declared.name in packages)
    return next(keys, next(iter(wanted)))


def _called(view: ModuleView, target: str, call: ast.Call) -> tuple[FunctionNode | None, set[object]]:
    """The file's function that a call runs, and the names of packages' functions that may replace it."""
    if isinstance(call.func, ast.Name):
        function = view.functions.get(call.func.id)
        above = function.decorator_list if function is not None else ()
        hub = (one for one in above if isinstance(one, ast.Call) and last_name(one.func) == _DECORATOR)
        return function, {getattr(one.args[0], "value", "") for one in hub if one.args}
    value = held(view, target, own_attribute(call.func))
    match = None if value is None else _HELD.match(value)
    return (
        (None, set())
        if match is None
        else (view.functions.get(match["OWN"]), {of_package(view, match["PACKAGE"])})
    )


def held(view: ModuleView, target: str, name: str) -> ast.expr | None:
    """What ``__init__`` of a method's class assigns to an attribute of ``self``, if that is one value."""
    owner = view.classes[target.partition(".")[0]]
    values = [value for attribute, value in initialised_by(view, owner) if attribute == name]
    return values[0] if len(values) == 1 else None


def of_package(view: ModuleView, name: str) -> str:
    """The name that a global name of the file has in the package that it is imported from, or nothing."""
    imports = (one for one in module_statements(view.document.tree) if isinstance(one, ast.ImportFrom))
    aliases = (alias for one in imports if not one.level for alias in one.names)
    return next((alias.name for alias in aliases if (alias.asname or alias.name) == name), "")


def _parameters(function: FunctionNode) -> tuple[str, ...]:
    arguments = function.args
    return tuple(
        argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    )


def routed(
    view: ModuleView, target: str, method: FunctionNode, calls: list[ast.Call], formula: tuple[str, str]
) -> Site:
    """The site of a method whose calls ask the slot of ``formula``, op and variant."""
    op, variant = formula
    text = f"veomni_{op}.separated({slot_name(op, variant)}, self, {{}})"
    edits = [in_place(view, call.func, text.format(ast.unparse(call.func))) for call in calls]
    imports = [(f"veomni_hook.kernels.{op}", f"calls as veomni_{op}")]
    if all(own_attribute(call.func) for call in calls) and method.args.kwarg is not None:
        ends = (view.document.end(call.keywords[-1]) for call in calls)
        edits += [Edit(end, end, f", {added_boundaries(method, 'seq_idx')}") for end in ends]
        imports.append(SEPARATION)
    functions = (_called(view, target, call)[0] for call in calls)
    own = tuple(dict.fromkeys(function.name for function in functions if function is not None))
    return Site.asking(
        op,
        target,
        variant,
        calls[0],
        edits,
        captures={"function": ", ".join(dict.fromkeys(last_name(call.func) for call in calls))},
        relies_on=own,
        skips={target: _with_callees(view, own)},
        imports=tuple(imports),
    )


def added_boundaries(method: FunctionNode, name: str) -> str:
    """What hands boundaries of this name, of the ``**`` of a method, to a call that passes others."""
    return f"**veomni_separation.given({getattr(method.args.kwarg, 'arg', '{}')}, {name!r})"


def _with_callees(view: ModuleView, names: tuple[str, ...]) -> tuple[str, ...]:
    """Functions of the file, and those that they name in turn."""
    callees, waiting = dict.fromkeys(names), list(names)
    while waiting:
        named = [node.id for node in walk_ast(view.functions[waiting.pop()]) if isinstance(node, ast.Name)]
        new = dict.fromkeys(name for name in named if name in view.functions and name not in callees)
        callees |= new
        waiting += new
    return tuple(callees)
