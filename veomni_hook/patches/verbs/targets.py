"""Find the definition that a patch names: exactly one, or an error with the nearest names."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable

from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.document import Definition, Document, FunctionNode
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.tree import decorator_name

__all__ = ["class_named", "members", "plain", "resolve", "top_level"]

_PLACES = (
    ast.Module,
    ast.If,
    ast.Try,
    ast.With,
    ast.ExceptHandler,
    ast.For,
    ast.While,
    ast.Match,
    ast.match_case,
)


def plain(target: str) -> str:
    """The target without ``<locals>``, the form used for comparison."""
    return target.replace("<locals>.", "")


def resolve(
    document: Document, target: str, kinds: Collection[str], *, where: str, hint: str = "", declared: str = ""
) -> Definition:
    """Return the definition that ``target`` names.

    Of several in one block, the last is used, as at run time; `typing.overload` stubs do not count.

    Args:
        kinds: accepted kinds of `Definition`.
        where: the place that an error names.
        hint: for the error: what to do if there is none, shown before the nearest names.
        declared: for the error: the patch's target, if ``target`` is only a part of it.

    Raises:
        PatchTargetError: there is none, or there are several of which the module chooses one at import.
    """
    found = [d for d in document.find(target) if d.kind in kinds and not _is_overload(d)]
    what = " or ".join(kinds)
    if not found:
        names = [d.qualname for d in document.definitions() if d.kind in kinds and not _is_overload(d)]
        other = next((d.kind for d in document.find(target)), None)
        close = nearest(target, names)
        raise PatchTargetError(
            f"{target} is an {other}, not a {what}" if other else f"there is no {what} {target}",
            where=where,
            fix=f"{hint}correct the target; nearest {what} names: {listed(close)}",
            target=declared or target,
            nearest=close,
        )
    if len({_block(one) for one in found}) > 1:
        lines = listed(str(document.lineno(document.start(one.node))) for one in found)
        raise PatchTargetError(
            f"{what} {target} is defined {len(found)} times, in different branches (lines {lines})",
            where=where,
            fix="patch something that is defined once, or rewrite the branches",
            target=declared or target,
            nearest=(target,),
        )
    return found[-1]


def class_named(
    document: Document, target: str, *, where: str, declared: str = ""
) -> tuple[Definition, ast.ClassDef]:
    """Return the class that ``target`` names; raises like `resolve`."""
    definition = resolve(document, target, ("class",), where=where, declared=declared)
    if not isinstance(definition.node, ast.ClassDef):
        raise TypeError(f"{definition.qualname} is no class")
    return definition, definition.node


def members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """Names that a class body binds, also under ``if`` and ``try``, each with its last statement."""
    found: dict[str, ast.stmt] = {}
    pending: list[ast.AST] = list(node.body)
    while pending:
        child = pending.pop(0)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[child.name] = child
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            found.update({t.id: child for t in targets if isinstance(t, ast.Name)})
        elif isinstance(child, _PLACES):
            pending = [*ast.iter_child_nodes(child), *pending]
    return found


def method_names(node: ast.ClassDef) -> list[str]:
    """Names of the functions in a class body."""
    return [name for name, child in members(node).items() if isinstance(child, FunctionNode)]


def top_level(document: Document, name: str, kinds: Iterable[str]) -> list[Definition]:
    """Every definition of ``name`` that is outside classes and functions."""
    kinds = tuple(kinds)
    return [
        definition
        for definition in document.find(name)
        if definition.kind in kinds and all(isinstance(parent, _PLACES) for parent in definition.parents)
    ]


def _block(definition: Definition) -> int:
    """Identity of the list of statements that contains the definition."""
    parent = definition.parents[-1]
    lists = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    return next(id(block) for block in lists if block and any(node is definition.node for node in block))


def _is_overload(definition: Definition) -> bool:
    decorators: list[ast.expr] = getattr(definition.node, "decorator_list", [])
    return "overload" in map(decorator_name, decorators)
