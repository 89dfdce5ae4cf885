"""Find sums that are passed directly to a module of ``self``, such as a residual addition before a norm."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.statement_runs import Run, simple_target
from veomni_hook.patches.code.tree import blocks, own_attribute, walk_ast

__all__ = ["Added", "added_runs", "has_self", "is_the_call"]


@dataclass(frozen=True)
class Added:
    """A run that adds and normalises: the norm's attribute, and the names that hold the sum."""

    run: Run
    attribute: str
    total: str
    copy: str | None

    @property
    def lineno(self) -> int:
        """The line of the sum."""
        return self.run.statements[0].lineno

    def assigned(self, normalised: str, call: str) -> list[ast.stmt]:
        """Statements that assign the run's names from ``call``, which returns the sum and its norm."""
        sums = [name for name in (self.total, self.copy) if name not in (None, normalised)]
        if not sums:
            return ast.parse(f"{normalised} = {call}[1]").body
        copies = [f"{name} = {sums[0]}" for name in sums[1:] if name != sums[0]]
        return ast.parse("\n".join([f"{sums[0]}, {normalised} = {call}", *copies])).body


def has_self(method: FunctionNode) -> bool:
    """Whether the first parameter of a function is ``self``."""
    return bool(method.args.args) and method.args.args[0].arg == "self"


def added_runs(method: FunctionNode) -> Iterator[Added]:
    """Every sum that is passed to a module of ``self``, in text order."""
    for block in blocks(method):
        for first, statement in enumerate(block):
            total = _sum(statement)
            rest = block[first + 1 : first + 3] if total is not None else []
            if total is None or not rest:
                continue
            copy = simple_target(rest[0]) if _is_name(getattr(rest[0], "value", None), total) else None
            last = first + (1 if copy is None else 2)
            attribute = _called(block[last], total) if last < len(block) else None
            if attribute is not None:
                yield Added(Run(method, block, first, last), attribute, total, copy)


def _called(statement: ast.stmt, total: str) -> str | None:
    """The attribute of ``self`` that a statement calls with ``total`` as the first argument."""
    for node in walk_ast(statement):
        if isinstance(node, ast.Call) and node.args and _is_name(node.args[0], total):
            if attribute := own_attribute(node.func):
                return attribute
    return None


def is_the_call(call: ast.Call, added: Added) -> bool:
    """Whether this is the call of the norm itself, not a call that contains it."""
    return own_attribute(call.func) == added.attribute and _is_name(call.args[0], added.total)


def _sum(statement: ast.stmt) -> str | None:
    """The name that a statement assigns a sum to."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        return statement.target.id if isinstance(statement.target, ast.Name) else None
    value = getattr(statement, "value", None)
    is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
    return simple_target(statement) if is_sum else None


def _is_name(node: object, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
