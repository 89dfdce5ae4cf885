"""``exclude_from_output``: remove definitions, and their names from ``__all__``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.edit import remove_items, remove_statement
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.tree import blocks, module_statements, walk_ast
from veomni_hook.patches.plan import Plan
from veomni_hook.patches.verbs.targets import top_level

__all__ = ["plan_exclusions"]

_KINDS = ("class", "function", "assignment")


def plan_exclusions(plan: Plan) -> dict[str, int]:
    """Plan to remove every definition of the excluded names, and their entries in ``__all__``.

    Returns:
        The names, each with the index of its step: the caller must check that nothing uses them any more.

    Raises:
        PatchTargetError: a name is not defined at the top level, or only together with others.
    """
    names: dict[str, int] = {}
    for index, step in plan.of_kind("exclude"):
        names.setdefault(step.target, index)
    if not names:
        return {}
    excluded: dict[int, int] = {}
    for name, index in names.items():
        found = top_level(plan.document, name, _KINDS)
        if not found:
            known = [d.qualname for d in plan.document.definitions() if d.qualname.isidentifier()]
            close = nearest(name, known)
            raise PatchTargetError(
                f"there is no top-level class, function or assignment {name} to exclude",
                where=plan.where(index),
                fix=f"correct the name; nearest: {listed(close)}",
                target=name,
                nearest=close,
            )
        for definition in found:
            _check_alone(plan, index, definition.node, names)
            holder = excluded.setdefault(id(definition.node), index)
            if holder != index:
                plan.shared.setdefault(index, set()).add(holder)
    for block in blocks(plan.document.tree):
        gone = [statement for statement in block if id(statement) in excluded]
        for statement in gone:
            whole = len(gone) == len(block) and block is not plan.document.tree.body
            needed = whole and statement is gone[-1]
            edit = remove_statement(plan.document, statement, needed=needed, attached=True)
            plan.add(excluded[id(statement)], edit)
    _filter_all(plan, names)
    return names


def _check_alone(plan: Plan, index: int, node: ast.AST, names: dict[str, int]) -> None:
    others = [n for n in _bound(node) if n not in names]
    if others:
        raise PatchTargetError(
            f"{plan.steps[index].target} is assigned together with {listed(others)}"
            f" (line {plan.document.lineno(plan.document.start(node))})",
            where=plan.where(index),
            fix="exclude all the names of that statement, or none",
            target=plan.steps[index].target,
        )


def _bound(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.Assign):
        return []
    return [n.id for target in node.targets for n in walk_ast(target) if isinstance(n, ast.Name)]


def _filter_all(plan: Plan, names: dict[str, int]) -> None:
    for statement in module_statements(plan.document.tree):
        if not _concerns_all(statement):
            continue
        for found in walk_ast(statement):
            if isinstance(found, ast.List | ast.Tuple | ast.Set) and found.elts:
                dropped = dict(_named(found, names))
                is_tuple = isinstance(found, ast.Tuple)
                if dropped:
                    index = next(iter(dropped.values()))
                    plan.add(index, *remove_items(plan.document, found.elts, dropped, lone_comma=is_tuple))


def _named(found: ast.List | ast.Tuple | ast.Set, names: dict[str, int]) -> Iterator[tuple[int, int]]:
    for number, element in enumerate(found.elts):
        if isinstance(element, ast.Constant) and element.value in names:
            yield number, names[str(element.value)]


def _concerns_all(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        targets = [called.value] if isinstance(called, ast.Attribute) else []
    else:
        return False
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)
