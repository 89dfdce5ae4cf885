"""Small questions about a syntax tree, asked by `concerns`."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable

from veomni_hook.patches.code.tree import decorator_name, last_name
from veomni_hook.tools.migration.usage import identifiers

__all__ = [
    "about_positions",
    "body_of",
    "calls",
    "class_attributes",
    "decorator_names",
    "dtype_in_training",
    "in_float32",
    "only_raises",
    "unreached",
]

#: They make or describe tensors: a dtype there is not the dtype of a computation.
_MAKERS = re.compile("finfo|tensor|arange|empty|full|ones|zeros|new_.*")


def calls(tree: ast.Module, pattern: re.Pattern[str]) -> Counter[str]:
    """How often functions and methods whose name matches are called."""
    names = (last_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    return Counter(name for name in names if pattern.fullmatch(name))


def in_float32(tree: ast.Module) -> set[str]:
    """What is made float32: the last name of what is cast, or the function that has it as its dtype."""
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _MAKERS.fullmatch(last_name(node.func)):
            continue
        function = node.func
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        named = any(last_name(value) == "float32" for value in values)
        if isinstance(function, ast.Attribute) and function.attr in ("to", "type", "float"):
            if named or function.attr == "float":
                names.add(_receiver(function.value))
        elif named:
            names.add(last_name(function))
    return names - {""}


def _receiver(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return last_name(node)


def dtype_in_training(tree: ast.Module) -> bool:
    """Whether what is cast, or to what, depends on training."""
    return any(
        isinstance(node, ast.If | ast.IfExp)
        and "training" in identifiers(node.test)
        and any("dtype" in identifiers(one) for one in ast.iter_child_nodes(node) if one is not node.test)
        for node in ast.walk(tree)
    )


def about_positions(tree: ast.Module) -> list[str]:
    """What is done to the axes of position ids, in words."""
    remarks = []
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.Assign)):
        if not any(last_name(target).endswith("position_ids") for target in node.targets):
            continue
        for call in (one for one in ast.walk(node.value) if isinstance(one, ast.Call)):
            first = call.args[0] if call.args else None
            if last_name(call.func) in ("transpose", "permute"):
                remarks.append("axes of position ids are exchanged")
            elif last_name(call.func) == "expand" and isinstance(first, ast.Constant):
                remarks.append(f"position ids with {first.value!r} rows")
    return remarks


def class_attributes(tree: ast.Module) -> list[tuple[str, str]]:
    """Names and values of the attributes that a class statement assigns."""
    return [
        (last_name(target), ast.unparse(node.value))
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]


def decorator_names(tree: ast.Module) -> set[str]:
    """The decorators of the definition."""
    decorators = getattr(tree.body[0], "decorator_list", []) if tree.body else []
    return set(map(decorator_name, decorators))


def body_of(tree: ast.Module) -> list[ast.stmt]:
    """The statements of the definition; none if there is no definition."""
    return list(getattr(tree.body[0], "body", [])) if tree.body else []


def only_raises(tree: ast.Module) -> bool:
    """Whether the body of the definition is a single `raise`."""
    return [type(node) for node in body_of(tree)] == [ast.Raise]


def unreached(tree: ast.Module) -> dict[str, str]:
    """The names that only branches use that never run, each with the parameter that the branch depends on.

    Such a branch asks the other keyword arguments for a parameter of the function, which is never among them.
    """
    names: dict[str, str] = {}
    idle: Counter[str] = Counter()
    for function in (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)):
        tests = _never_true(function)
        for branch in (one for one in ast.walk(function) if isinstance(one, ast.If)):
            if parameter := tests.get(ast.unparse(branch.test)):
                used = _names(branch.body)
                names |= dict.fromkeys(used, parameter)
                idle += used
    return {name: parameter for name, parameter in names.items() if idle[name] == _names([tree])[name]}


def _never_true(function: ast.FunctionDef) -> dict[str, str]:
    """What asks for a parameter in `**kwargs`, where the function does not put it, as text."""
    arguments = function.args
    if arguments.kwarg is None:
        return {}
    rest = arguments.kwarg.arg
    items = (one for one in ast.walk(function) if isinstance(one, ast.Subscript))
    put = {ast.unparse(one) for one in items if isinstance(one.ctx, ast.Store)}
    known = (one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    asked = [name for name in known if f"{rest}[{name!r}]" not in put]
    return {f"{rest}.get({name!r}{end})": name for name in asked for end in ("", ", None", ", False")}


def _names(nodes: Iterable[ast.AST]) -> Counter[str]:
    return Counter(one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name))
