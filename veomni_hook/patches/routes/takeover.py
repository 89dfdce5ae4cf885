"""The guard that lets a kernel replace a run of statements.

If the function's ``return`` follows directly, the guard returns the function's result. Otherwise the run
moves to the ``else`` of the guard, in a copy of the method (`veomni_hook.patches.routes.fused`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace

from veomni_hook.patches.code.edit import FUSED, Edit
from veomni_hook.patches.code.scope import bound_names, loaded
from veomni_hook.patches.code.statement_runs import Run, put_together, simple_target
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.routes.fused import method_at
from veomni_hook.patches.routes.insertion import before_statement, free_name
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["guard"]

# Above this limit a guard would repeat more upstream code than it adds.
_LONGEST_TAIL = 4


def guard(  # noqa: PLR0913 - all but the first five by keyword
    view: ModuleView,
    run: Run,
    slot: str,
    asked: Sequence[str],
    answer: Sequence[ast.stmt],
    comment: str,
    *,
    tests: Iterable[str] = (),
    returns: bool = True,
    beside: bool = False,
    before: str = "",
) -> tuple[Edit, ...] | None:
    """The edits that let ``answer`` replace the run if a slot has a kernel; None if impossible.

    Args:
        slot: the slot's name. What it returns has the function's free name for ``kernel``.
        asked: the arguments for the slot, as source text; empty: only ``tests`` decide.
        answer: assigns what the run assigns and later code reads, or returns.
        tests: conditions in front of the question.
        returns: whether the guard may return, skipping the rest of the function.
        beside: whether other values that later code reads may be recomputed after the answer; the run must
            be free of side effects.
        before: statements in front of the condition.
    """
    code: Sequence[ast.stmt] | None = answer
    if not isinstance(answer[-1], ast.Return):
        outside = set(loaded(run.function.body, skip=run.statements))
        if beside:
            answer = [*answer, *_beside(run, outside & _lost(run, answer))]
        if outside & _lost(run, answer) or not all(map(view.document.begins_line, run.statements)):
            return None
        code = _to_the_end(run, answer) if returns else None
    kernel = free_name(run.function, "kernel")
    asks = [f"({kernel} := {slot}.kernel({', '.join(asked)})) is not None"] if asked else []
    head = f"{before}if {' and '.join([*tests, *asks])}:\n"
    if code is None and method_at(view.document, view.document.start(run.statements[0])) is None:
        return None
    if code is None:
        return _with_else(view, run, head + _indented(answer), comment, slot)
    return before_statement(view, run.function, run.statements[0], head + _indented(code), comment)


def _lost(run: Run, answer: Sequence[ast.stmt]) -> set[str]:
    return bound_names(run.statements) - bound_names(answer)


def _beside(run: Run, names: set[str]) -> list[ast.stmt]:
    """The statements of a run that assign ``names``, if they depend only on values from before the run."""
    found = [each for each in run.statements if bound_names([each]) & names]
    bound = bound_names(run.statements)
    for each in found:
        name = simple_target(each)
        needed = bound & set(loaded([each])) - {name}
        if name is None or needed or _calls_module(run, each):
            return []
    targets = [simple_target(each) for each in found]
    # With two assignments to one name, the second one counts, but it may read the first.
    return found if len(set(targets)) == len(names) == len(found) else []


def _calls_module(run: Run, statement: ast.stmt) -> bool:
    calls = (node.func for node in walk_ast(statement) if isinstance(node, ast.Call))
    receiver = run.function.args.args[0].arg
    return any(isinstance(each, ast.Attribute) and receiver in loaded([each.value]) for each in calls)


def _to_the_end(run: Run, answer: Sequence[ast.stmt]) -> list[ast.stmt] | None:
    """The answer and the rest of the function after the run, if that is short."""
    tail = run.tail
    ends = run.block is run.function.body and tail and isinstance(tail[-1], ast.Return)
    if not ends or len(tail) > _LONGEST_TAIL:
        return None
    for number in range(len(answer)):
        value = put_together([*answer[number:], *tail])
        if value is not None:
            return [*answer[:number], ast.Return(value)]
    value = put_together(tail)
    return [*answer, ast.Return(value)] if value is not None else None


def _with_else(view: ModuleView, run: Run, code: str, comment: str, slot: str) -> tuple[Edit, ...]:
    edits = before_statement(view, run.function, run.statements[0], f"{code}\nelse:", comment)
    start, end = edits[0].start, view.document.end(run.statements[-1])
    fuses = f"{slot}.fuses({run.function.args.args[0].arg})"
    return (*(replace(edit, form=FUSED) for edit in edits), Edit(start, end, "    ", fuses=fuses))


def _indented(statements: Iterable[ast.stmt]) -> str:
    return "\n".join(f"    {_text(ast.fix_missing_locations(each))}" for each in statements)


def _text(statement: ast.stmt) -> str:
    if (
        isinstance(statement, ast.Return)
        and isinstance(statement.value, ast.Tuple)
        and len(statement.value.elts) > 1
    ):
        return f"return {', '.join(map(ast.unparse, statement.value.elts))}"
    return ast.unparse(statement)
