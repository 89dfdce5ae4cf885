"""Find the statements of an attention's forward that normalise queries and keys and then rotate them.

The run can be written without the norms if nothing else uses or changes the normalised tensors before the
rotation. Heads may be transposed in between: that does not affect a norm over the last dimension.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_names, loaded, local_names
from veomni_hook.patches.code.statement_runs import Run, simple_target
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import blocks, is_plain, swapped, walk_ast

__all__ = ["TurnedNorms"]

HEADS_FIRST = Template("X.transpose(1, 2)")


class _Step(NamedTuple):
    """A statement and its number in the block; with the test if it is inside an ``if`` of the run."""

    number: int
    statement: ast.stmt
    test: ast.expr | None = None


@dataclass(frozen=True)
class TurnedNorms:
    """A run from the first of two norms to the call that rotates their results.

    Attributes:
        run: the statements.
        norms: the calls of both norms, in the order of the requested names.
        tests: the tests of ``if`` statements in the run; if all hold, the whole run is executed.
        tensor: a local that holds a tensor before the run.
    """

    run: Run
    norms: tuple[ast.Call, ast.Call]
    tests: tuple[ast.expr, ...]
    tensor: str
    _steps: tuple[_Step, ...]

    @classmethod
    def around(
        cls,
        function: FunctionNode,
        call: ast.Call,
        names: Sequence[str],
        is_norm: Callable[[ast.AST], object],
    ) -> TurnedNorms | str:
        """The run that ends with ``call``, whose arguments are ``names``; else why there is none."""
        for block in blocks(function):
            steps = list(_steps(block, call, names))
            last = next((n for n, each in enumerate(steps) if _value_of(each.statement) is call), 0)
            q, k = (_normed(steps[:last], name, is_norm) for name in names)
            if q is not None and k is not None:
                first, norm = min(q, k, key=lambda place: place[0])
                run = Run(function, block, steps[first].number, steps[last].number)
                inside = [step for step in steps if run.first <= step.number <= run.last]
                later = loaded(
                    [*function.body, *(each.statement for each in steps[last + 1 :])], run.statements
                )
                if any(_does_more(step.statement) for step in inside):
                    return "a statement between norms and rotation does more than assign"
                if set(names) & set(later) - bound_names([steps[last].statement]):
                    return "the normalised tensors are used again after the rotation"
                tests = tuple(step.test for step in inside if step.test is not None)
                tensor = _tensor(function, norm.args[0])
                if not all(map(is_plain, tests)) or bound_names(run.statements) & set(loaded(tests)):
                    return "the test around the norms or the rotation cannot be evaluated before them"
                return (
                    cls(run, (q[1], k[1]), tests, tensor, tuple(inside)) if tensor else "no tensor is known"
                )
        return "heads are joined or changed between norms and rotation, or these are in different blocks"

    def without_norms(self, call: ast.Call, by: ast.expr) -> list[ast.stmt]:
        """The statements of the run without the norms, and with ``call`` replaced by ``by``."""
        swaps = {id(call): (by,), **{id(norm): (norm.args[0],) for norm in self.norms}}
        made = [swapped(step.statement, swaps) for step in self._steps]
        return [each for each in made if getattr(_value_of(each), "id", "") != simple_target(each)]

    def tables(self, cos: str, sin: str) -> str:
        """Code for cos and sin that is valid before the run; ``None`` if the run computes them."""
        tables = f"({cos}, {sin})"
        for step in self._steps:
            targets = getattr(step.statement, "targets", ())
            if any(
                isinstance(each, ast.Tuple) and ast.unparse(each) in (tables, tables[1:-1])
                for each in targets
            ):
                value = _value_of(step.statement)
                tables = value.id if isinstance(value, ast.Name) else "None"
        return "None" if bound_names(self.run.statements) & set(loaded([ast.parse(tables)])) else tables


def _value_of(statement: ast.stmt) -> ast.expr | None:
    """What a statement assigns."""
    return statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None


def _steps(block: Sequence[ast.stmt], call: ast.Call, names: Sequence[str]) -> Iterator[_Step]:
    """The statements of a block; an ``if`` around ``call`` or an assignment to ``names`` is expanded."""
    for number, statement in enumerate(block):
        if isinstance(statement, ast.If) and not statement.orelse:
            if call in walk_ast(statement) or bound_names(statement.body) & set(names):
                yield from (_Step(number, inner, statement.test) for inner in statement.body)
                continue
        yield _Step(number, statement)


def _normed(
    steps: Sequence[_Step], name: str, is_norm: Callable[[ast.AST], object]
) -> tuple[int, ast.Call] | None:
    """The last step that assigns a norm's result to ``name``, if later steps only transpose it."""
    for number in range(len(steps) - 1, -1, -1):
        statement = steps[number].statement
        if name not in {*bound_names([statement]), *loaded([statement])}:
            continue
        inner = _value_of(statement) if simple_target(statement) == name else None
        while inner is not None and (heads_first := HEADS_FIRST.match(inner)) is not None:
            inner = heads_first.expression("X")
        if isinstance(inner, ast.Call) and is_norm(inner):
            return number, inner
        if getattr(inner, "id", "") != name:
            return None
    return None


def _does_more(statement: ast.stmt) -> bool:
    """Whether a statement is neither an assignment nor an expression, or may change a tensor in place."""
    nodes = list(walk_ast(statement))
    called = (node.func for node in nodes if isinstance(node, ast.Call))
    names = (function.attr for function in called if isinstance(function, ast.Attribute))
    plain = isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr)
    stores = any(isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) for node in nodes)
    return stores or not plain or any(name.endswith("_") and not name.endswith("__") for name in names)


def _tensor(function: FunctionNode, node: ast.expr) -> str:
    """The local that an expression derives a tensor from, through method and module calls."""
    if isinstance(node, ast.Call):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        found = _tensor(function, inner) if inner is not None else ""
        return found or (_tensor(function, node.args[0]) if node.args else "")
    if isinstance(node, ast.Subscript):
        return _tensor(function, node.value)
    name = getattr(node, "id", "")
    return name if name in local_names(function) - {function.args.args[0].arg} else ""
