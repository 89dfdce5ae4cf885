"""Calls of functions that transformers declares to be those of a package, in the methods of classes.

``@use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")`` above a function says that a
package's function of this name may run in its place. So its name there and its parameters say what it
computes, whatever the body looks like; tests compare the body with our formula.

In earlier releases ``self.rule = chunk_gated_delta_rule or torch_chunk_gated_delta_rule`` says the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import parameters
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import calls_in, in_text_order, last_name, own_attribute, walk_ast
from veomni_hook.patches.idioms.shared import check_self
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView, initialised_by
from veomni_hook.patches.site import Code, Missed, Site, slot_name

__all__ = ["Declared", "asked", "calls_named", "check", "packages", "routed"]

_DECORATOR = "use_kernel_func_from_hub_with_fallback"
_HELD = Template("PACKAGE or OWN")


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
    check_self(method)
    for call in calls:
        called, (own, _) = last_name(call.func), _called(view, target, call)
        function = view.functions.get(own)
        if function is None or view.scope.functions.get(own) is not function:
            raise Missed(f"{called} is not one function of the file", call, Code.REPLACED)
        if wanted.name not in packages(view, target, call):
            text = f"{called} is not declared as the {wanted.name} of a package"
            raise Missed(text, function, Code.DECORATED)
        if [one.arg for one in parameters(function)] != [
            *wanted.parameters,
            getattr(function.args.kwarg, "arg", ""),
        ]:
            raise Missed(f"{called} has other parameters", function, Code.OTHER_ARGUMENTS)
        passed = {keyword.arg for keyword in call.keywords}
        if None not in passed and passed.isdisjoint(wanted.boundaries):
            raise Missed("the call passes no boundaries of samples", call, Code.NO_BOUNDARIES)


def packages(view: ModuleView, target: str, call: ast.Call) -> set[object]:
    """The names of packages' functions that a call in a method may run in place of the file's."""
    own, package = _called(view, target, call)
    if package:
        return {*view.from_packages(package)}
    above = view.functions[own].decorator_list if own in view.functions else ()
    hub = (one for one in above if isinstance(one, ast.Call) and last_name(one.func) == _DECORATOR)
    return {getattr(one.args[0], "value", "") for one in hub if one.args}


def _called(view: ModuleView, target: str, call: ast.Call) -> tuple[str, str]:
    """The names of the function that a call runs, and of a package's that a layer may hold instead."""
    if isinstance(call.func, ast.Name):
        return call.func.id, ""
    owner, name = view.classes[target.partition(".")[0]], own_attribute(call.func)
    values = [value for attribute, value in initialised_by(view, owner) if attribute == name]
    if len(values) != 1 or (match := _HELD.match(values[0])) is None:
        return "", getattr(values[0], "id", "") if len(values) == 1 else ""
    return match["OWN"], match["PACKAGE"]


def routed(
    view: ModuleView, target: str, method: FunctionNode, calls: list[ast.Call], formula: tuple[str, str]
) -> Site:
    """The site of a method whose calls ask the slot of ``formula``, op and variant."""
    called = [_called(view, target, call) for call in calls]
    own = tuple(dict.fromkeys(name for name, _ in called if name))
    edits = [
        in_place(view, call.func, asked(method, formula, ast.unparse(call.func), package))
        for call, (_, package) in zip(calls, called, strict=True)
    ]
    return Site.asking(
        formula[0],
        target,
        formula[1],
        calls[0],
        edits,
        captures={"function": ", ".join(dict.fromkeys(last_name(call.func) for call in calls))},
        relies_on=own,
        skips={target: _with_callees(view, own)},
        imports=((f"veomni_hook.kernels.{formula[0]}", f"calls as veomni_{formula[0]}"),),
    )


def asked(method: FunctionNode, formula: tuple[str, str], function: str, package: str) -> str:
    """Code of what to call in place of a function, which may be a package's that the layer holds."""
    held = f", {package}, {method.args.kwarg.arg}" if package and method.args.kwarg is not None else ""
    return f"veomni_{formula[0]}.separated({slot_name(*formula)}, self, {function}{held})"


def _with_callees(view: ModuleView, names: tuple[str, ...]) -> tuple[str, ...]:
    """Functions of the file, and those that they name in turn."""
    callees, waiting = dict.fromkeys(names), list(names)
    while waiting:
        named = [node.id for node in walk_ast(view.functions[waiting.pop()]) if isinstance(node, ast.Name)]
        new = dict.fromkeys(name for name in named if name in view.functions and name not in callees)
        callees |= new
        waiting += new
    return tuple(callees)
