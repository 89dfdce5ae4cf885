"""``drop_import_names`` and ``exclude_from_output``: take names out of imports, definitions and ``__all__``.

Both leave the names in `Plan.gone`: nothing may use them any more, unless something else provides them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import remove_items, remove_statement
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.tree import blocks, module_statements, walk_ast
from veomni_hook.patches.plan import Plan, Task
from veomni_hook.patches.verbs.targets import top_level

__all__ = ["importable", "plan_drops", "plan_exclusions"]


def plan_drops(plan: Plan) -> None:
    """Plan to remove names from module-level imports, including those under ``if`` and ``try``.

    A name may be the imported name, the last part of a dotted name, or the alias.

    Raises:
        PatchTargetError: a name is not imported, and its config is not lenient.
    """
    document, wanted = plan.document, {task.target: task for task in plan.of_kind("drop_import")}
    imported: set[Task] = set()
    for block in blocks(document.tree):
        imports = [statement for statement in block if isinstance(statement, ast.Import | ast.ImportFrom)]
        dropped = {statement: _dropped(statement, wanted) for statement in imports}
        gone = [statement for statement in imports if len(dropped[statement]) == len(statement.names)]
        for statement, names in dropped.items():
            if not names:
                continue
            for number, tasks in names.items():
                alias = statement.names[number]
                plan.gone[alias.asname or alias.name.partition(".")[0]] = tasks[0]
            task, *others = dict.fromkeys(task for tasks in names.values() for task in tasks)
            imported.update((task, *others))
            if statement in gone:
                needed = _holds_block(document, block, gone, statement)
                task.add(remove_statement(document, statement, needed=needed), beside=others)
            else:
                task.add(*remove_items(document, statement.names, names), beside=others)
    for name, task in wanted.items():
        if task not in imported:
            error = task.missing(
                f"{name} cannot be dropped from the imports: it is not imported at module level",
                "correct the name given to drop_import_names; nearest",
                name,
                {n for statement in module_statements(document.tree) for n in importable(statement)},
            )
            task.tolerate(error)
            task.idle = True


def _dropped(statement: ast.Import | ast.ImportFrom, wanted: Mapping[str, Task]) -> dict[int, list[Task]]:
    """The names of an import that are dropped, by their numbers, each with the tasks that name it."""
    tasks = [[wanted[name] for name in _names(alias) if name in wanted] for alias in statement.names]
    return {number: named for number, named in enumerate(tasks) if named}


def _names(alias: ast.alias) -> list[str]:
    """What an imported name may be called to drop it."""
    return [name for name in (alias.asname, alias.name, alias.name.rpartition(".")[2]) if name]


def importable(statement: ast.stmt) -> Iterator[str]:
    """The names under which `plan_drops` finds a statement's imports; none if it is not an import."""
    for alias in statement.names if isinstance(statement, ast.Import | ast.ImportFrom) else ():
        yield from _names(alias)


def _holds_block(
    document: Document, block: list[ast.stmt], gone: Sequence[ast.stmt], statement: ast.stmt
) -> bool:
    """Whether a statement that goes is the last one of a block, which must not become empty."""
    return len(gone) == len(block) and block is not document.tree.body and statement is gone[-1]


def plan_exclusions(plan: Plan) -> None:
    """Plan to remove every definition of the excluded names, and their entries in ``__all__``.

    Raises:
        PatchTargetError: a name is not defined at the top level, or only together with others.
    """
    document = plan.document
    tasks = {task.target: task for task in plan.of_kind("exclude")}
    excluded: dict[int, list[Task]] = {}
    for name, task in tasks.items():
        definitions = top_level(document, name)
        if not definitions:
            raise task.missing(
                f"there is no top-level class, function or assignment {name} to exclude",
                "correct the name; nearest",
                name,
                [d.qualname for d in document.definitions() if d.qualname.isidentifier()],
            )
        for definition in definitions:
            _check_alone(task, definition.node, tasks)
            excluded.setdefault(id(definition.node), []).append(task)
    for block in blocks(document.tree):
        gone = [statement for statement in block if id(statement) in excluded]
        for statement in gone:
            needed = _holds_block(document, block, gone, statement)
            task, *others = excluded[id(statement)]
            task.add(remove_statement(document, statement, needed=needed, attached=True), beside=others)
    _filter_all(document, tasks)
    plan.gone |= tasks


def _check_alone(task: Task, node: ast.AST, tasks: Mapping[str, Task]) -> None:
    bound = [n for target in node.targets for n in walk_ast(target)] if isinstance(node, ast.Assign) else []
    others = [n.id for n in bound if isinstance(n, ast.Name) and n.id not in tasks]
    if others:
        raise task.error(
            PatchTargetError,
            f"{task.target} is assigned together with {listed(others)}"
            f" (line {task.document.lineno(task.document.start(node))})",
            "exclude all the names of that statement, or none",
        )


def _filter_all(document: Document, tasks: Mapping[str, Task]) -> None:
    for statement in filter(_concerns_all, module_statements(document.tree)):
        for node in walk_ast(statement):
            if not isinstance(node, ast.List | ast.Tuple | ast.Set):
                continue
            dropped = {
                number: tasks[str(element.value)]
                for number, element in enumerate(node.elts)
                if isinstance(element, ast.Constant) and element.value in tasks
            }
            if dropped:
                edits = remove_items(document, node.elts, dropped, lone_comma=isinstance(node, ast.Tuple))
                next(iter(dropped.values())).add(*edits)


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
