"""Remove dropped names from upstream's imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.edit import remove_items, remove_statement
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.tree import blocks
from veomni_hook.patches.plan import Plan

__all__ = ["bound_name", "importable", "plan_drops"]


def plan_drops(plan: Plan) -> dict[str, int]:
    """Plan to remove names from module-level imports, including those under ``if`` and ``try``.

    A name may be the imported name, the last part of a dotted name, or the alias.

    Returns:
        The names that the dropped imports bound, each with the index of its step: the caller must check
        that something else provides the names still in use.

    Raises:
        PatchTargetError: a name is not imported, and its config is not lenient.
    """
    wanted: dict[str, int] = {}
    for index, step in plan.of_kind("drop_import"):
        wanted.setdefault(step.target, index)
    if not wanted:
        return {}
    bound: dict[str, int] = {}
    found: set[str] = set()
    for block in blocks(plan.document.tree):
        emptied = {}
        for statement in block:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                dropped = dict(_matches(statement, wanted))
                found.update(name for names in dropped.values() for name in names)
                bound |= {bound_name(statement.names[n]): wanted[names[0]] for n, names in dropped.items()}
                if dropped:
                    emptied[id(statement)] = _drop(plan, statement, dropped, wanted)
        if len(emptied) == len(block) and all(emptied.values()) and block is not plan.document.tree.body:
            _keep_block(plan, block)
    for name, index in wanted.items():
        if name not in found:
            plan.tolerate(index, _not_imported(plan, index, name))
            plan.idle.add(index)
    return bound


def _not_imported(plan: Plan, index: int, name: str) -> PatchTargetError:
    close = nearest(name, {n for b in blocks(plan.document.tree) for s in b for n in importable(s)})
    return PatchTargetError(
        f"{name} cannot be dropped from the imports: it is not imported at module level",
        where=plan.where(index),
        fix=f"correct the name given to drop_import_names; nearest: {listed(close)}",
        target=name,
        nearest=close,
    )


def bound_name(alias: ast.alias) -> str:
    """The name that an import binds: ``a`` for ``import a.b``."""
    return alias.asname or alias.name.partition(".")[0]


def _matches(
    statement: ast.Import | ast.ImportFrom, wanted: dict[str, int]
) -> Iterator[tuple[int, list[str]]]:
    for number, alias in enumerate(statement.names):
        names = [name for name in (alias.asname, alias.name, alias.name.rpartition(".")[2]) if name in wanted]
        if names:
            yield number, [str(name) for name in names]


def importable(statement: ast.stmt) -> Iterator[str]:
    """The names under which `plan_drops` finds a statement's imports; none if it is not an import."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.name
            yield bound_name(alias)


def _drop(
    plan: Plan, statement: ast.Import | ast.ImportFrom, dropped: dict[int, list[str]], wanted: dict[str, int]
) -> bool:
    """Plan the removal from one statement; return whether nothing is left of it."""
    index, *others = dict.fromkeys(wanted[name] for names in dropped.values() for name in names)
    for other in others:
        plan.shared.setdefault(other, set()).add(index)
    if len(dropped) == len(statement.names):
        plan.add(index, remove_statement(plan.document, statement, needed=False))
        return True
    plan.add(index, *remove_items(plan.document, statement.names, dropped))
    return False


def _keep_block(plan: Plan, block: list[ast.stmt]) -> None:
    """Replace the last statement of a block that would become empty with ``pass``."""
    start, end = plan.document.span(block[-1])[0], plan.document.end(block[-1])
    for number, edit in enumerate(plan.edits):
        if edit.start <= start < edit.end:
            del plan.edits[number]
            plan.change(edit.patch, start, end, "pass")
            return
