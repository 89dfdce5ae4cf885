"""Calls of functions that transformers declares to be those of a package, in the methods of classes.

``@use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")`` above a function says that a
package's function of this name may run in its place. So its name there and its parameters say what it
computes, whatever the body looks like; tests compare the body with our formula.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import own_names
from veomni_hook.patches.code.tree import calls_in, in_text_order, last_name, walk_ast
from veomni_hook.patches.graph import receiver_name
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, slot_name

__all__ = ["Declared", "calls_named", "check", "declared_as", "routed"]

_DECORATOR = "use_kernel_func_from_hub_with_fallback"


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


def check(view: ModuleView, method: FunctionNode, calls: list[ast.Call], wanted: Declared) -> None:
    """Check that calls in a method are of upstream's function for ``wanted`` and pass boundaries.

    Raises:
        Missed: they are not.
    """
    if receiver_name(method) != "self" or "self" in own_names(method.body):
        raise Missed("self is not the method's module", code=Code.REPLACED)
    for call in calls:
        called = last_name(call.func)
        function = view.functions.get(called) if isinstance(call.func, ast.Name) else None
        if function is None or view.scope.functions.get(called) is not function:
            raise Missed(f"{called} is not one function of the file", call, Code.REPLACED)
        if not any(_declares(decorator, wanted.name) for decorator in function.decorator_list):
            text = f"{called} is not declared as the {wanted.name} of a package"
            raise Missed(text, function, Code.DECORATED)
        if _parameters(function) != wanted.parameters or function.args.kwarg is None:
            raise Missed(f"{called} has other parameters", function, Code.OTHER_ARGUMENTS)
        passed = {keyword.arg for keyword in call.keywords}
        if None not in passed and passed.isdisjoint(wanted.boundaries):
            raise Missed("the call passes no boundaries of samples", call, Code.NO_BOUNDARIES)


def declared_as(view: ModuleView, calls: list[ast.Call], wanted: Mapping[str, Declared]) -> str:
    """Return which of ``wanted`` the first call's function is declared to be; the first key if none."""
    function = view.functions.get(last_name(calls[0].func))
    decorators = () if function is None else function.decorator_list
    keys = (
        key
        for key, declared in wanted.items()
        if any(_declares(above, declared.name) for above in decorators)
    )
    return next(keys, next(iter(wanted)))


def _declares(decorator: ast.expr, name: str) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and last_name(decorator.func) == _DECORATOR
        and bool(decorator.args)
        and isinstance(decorator.args[0], ast.Constant)
        and decorator.args[0].value == name
    )


def _parameters(function: FunctionNode) -> tuple[str, ...]:
    arguments = function.args
    return tuple(
        argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    )


def routed(
    view: ModuleView, target: str, calls: list[ast.Call], formula: tuple[str, str], module: str
) -> Site:
    """The site of a method whose calls ask the slot, by the function ``separated`` of ``module``.

    Args:
        view: the module.
        target: the method.
        calls: the calls.
        formula: op and variant.
        module: the module of ``separated``, in the op's folder of kernels, and its name in patched code.
    """
    op, variant = formula
    alias = f"veomni_{op}"
    text = f"{alias}.separated({slot_name(op, variant)}, self, {{}})"
    names = tuple(dict.fromkeys(last_name(call.func) for call in calls))
    return Site.asking(
        op,
        target,
        variant,
        calls[0],
        [in_place(view, call.func, text.format(ast.unparse(call.func))) for call in calls],
        captures={"function": ", ".join(names)},
        relies_on=names,
        skips={target: _with_callees(view, names)},
        imports=((f"veomni_hook.kernels.{op}", f"{module} as {alias}"),),
    )


def _with_callees(view: ModuleView, names: tuple[str, ...]) -> tuple[str, ...]:
    """Functions of the file, and those that they name in turn."""
    callees, waiting = dict.fromkeys(names), list(names)
    while waiting:
        named = [node.id for node in walk_ast(view.functions[waiting.pop()]) if isinstance(node, ast.Name)]
        new = dict.fromkeys(name for name in named if name in view.functions and name not in callees)
        callees |= new
        waiting += new
    return tuple(callees)
