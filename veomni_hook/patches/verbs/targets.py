"""Find the definition that a patch names: exactly one, or an error with the nearest names."""

from __future__ import annotations

import ast
from collections.abc import Collection

from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.document import Definition, Document, FunctionNode
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.tree import DEFINITIONS, blocks, decorator_name, in_text_order
from veomni_hook.patches.plan import Task

__all__ = ["class_named", "function_named", "members", "method_names", "resolve", "top_level"]


def resolve(task: Task, kinds: Collection[str], *, target: str = "", hint: str = "") -> Definition:
    """Return the definition that a patch names.

    Of several in one block, the last is used, as at run time; `typing.overload` stubs do not count.

    Args:
        task: the patch's.
        kinds: accepted kinds of `Definition`.
        target: the name, if it is only a part of the patch's target.
        hint: for the error: what to do if there is none, shown before the nearest names.

    Raises:
        PatchTargetError: there is none, or there are several of which the module chooses one at import.
    """
    document, target = task.document, target or task.target
    definitions = [d for d in document.find(target) if d.kind in kinds and not _is_overload(d)]
    what = " or ".join(kinds)
    if not definitions:
        names = [d.qualname for d in document.definitions() if d.kind in kinds and not _is_overload(d)]
        other = next((d.kind for d in document.find(target)), None)
        told = f"{target} is an {other}, not a {what}" if other else f"there is no {what} {target}"
        raise task.missing(told, f"{hint}correct the target; nearest {what} names", target, names)
    if len({_block(one) for one in definitions}) > 1:
        lines = listed(str(document.lineno(document.start(one.node))) for one in definitions)
        raise task.error(
            PatchTargetError,
            f"{what} {target} is defined {len(definitions)} times, in different branches (lines {lines})",
            "patch something that is defined once, or rewrite the branches",
            nearest=(target,),
        )
    return definitions[-1]


def class_named(task: Task, target: str = "") -> tuple[Definition, ast.ClassDef]:
    """Return the class that a patch names, or ``target`` in it; raises like `resolve`."""
    definition = resolve(task, ("class",), target=target)
    if not isinstance(definition.node, ast.ClassDef):
        raise TypeError(f"{definition.qualname} is no class")
    return definition, definition.node


def function_named(task: Task, *kinds: str, hint: str = "") -> tuple[Definition, FunctionNode]:
    """Return the function, method, or one of the two, that a patch names; raises like `resolve`."""
    definition = resolve(task, kinds, hint=hint)
    if not isinstance(definition.node, FunctionNode):
        raise TypeError(f"{definition.qualname} is no function")
    return definition, definition.node


def members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """Names that a class body binds, also under ``if`` and ``try``, each with its last statement."""
    statements: dict[str, ast.stmt] = {}
    for child in in_text_order(statement for block in blocks(node) for statement in block):
        if isinstance(child, DEFINITIONS):
            statements[child.name] = child
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            statements.update({t.id: child for t in targets if isinstance(t, ast.Name)})
    return statements


def method_names(node: ast.ClassDef) -> list[str]:
    """Names of the functions in a class body."""
    return [name for name, child in members(node).items() if isinstance(child, FunctionNode)]


def top_level(document: Document, name: str) -> list[Definition]:
    """Every class, function and assignment of ``name`` that is outside classes and functions."""
    return [
        definition
        for definition in document.find(name)
        if not any(isinstance(parent, DEFINITIONS) for parent in definition.parents)
    ]


def _block(definition: Definition) -> int:
    """Identity of the list of statements that contains the definition."""
    parent = definition.parents[-1]
    lists = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    return next(id(block) for block in lists if block and any(node is definition.node for node in block))


def _is_overload(definition: Definition) -> bool:
    decorators: list[ast.expr] = getattr(definition.node, "decorator_list", [])
    return "overload" in map(decorator_name, decorators)
