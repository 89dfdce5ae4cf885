"""Combine a run of statements into one expression, made of copies of upstream's own expressions.

The result evaluates each expression once and keeps the order of calls; if that is impossible, there is none.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import loaded, local_names
from veomni_hook.patches.code.tree import binding, calls_in, child_nodes, walk_ast

__all__ = ["Run", "at_hand", "called", "kernel_call", "put_together", "simple_target"]

_OPAQUE = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda, ast.comprehension)
_COMPUTES = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare)
_LAZY = (ast.IfExp, ast.BoolOp)
_Node = TypeVar("_Node", bound=ast.AST)


@dataclass(frozen=True)
class Run:
    """The statements ``block[first:last + 1]`` of ``function``."""

    function: FunctionNode
    block: list[ast.stmt]
    first: int
    last: int

    @property
    def statements(self) -> list[ast.stmt]:
        """The run itself, at least one statement."""
        return self.block[self.first : self.last + 1]

    def longer(self, limit: int) -> Iterator[Run]:
        """The run, then runs of up to ``limit`` statements, each starting one assignment earlier."""
        for first in range(self.first, max(self.last - limit, -1), -1):
            if first != self.first and simple_target(self.block[first]) is None:
                return
            yield Run(self.function, self.block, first, self.last)

    def as_function(self) -> ast.FunctionDef:
        """A function of the locals that the run reads, ``self`` first; it returns the last value."""
        *before, last = self.statements
        value: ast.expr = getattr(last, "value")  # noqa: B009
        local = local_names(self.function)
        owner = [argument.arg for argument in self.function.args.args[:1]]
        names = dict.fromkeys([*owner, *(name for name in loaded([*before, value]) if name in local)])
        arguments = ast.arguments(
            posonlyargs=[], args=[ast.arg(name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[]
        )
        function = ast.FunctionDef(
            name=self.function.name,
            args=arguments,
            body=[*before, ast.copy_location(ast.Return(value), last)],
            decorator_list=[],
        )
        return ast.copy_location(function, self.function)


def simple_target(statement: ast.stmt) -> str | None:
    """The name that a statement assigns a simple expression to; None if it does anything else."""
    name, _ = binding(statement)
    return name if name and not _opaque(statement) else None


def put_together(
    statements: Sequence[ast.stmt],
    taken: ast.expr | None = None,
    operands: Mapping[str, ast.expr] | None = None,
    kernel: str = "",
) -> ast.expr | None:
    """The value of the last statement as one expression of values from before the first.

    Args:
        statements: simple assignments and a last statement that has a value.
        taken: the expression in them that a call of ``kernel`` with ``operands`` replaces.
        operands: upstream's expressions, from anywhere in ``statements``, by the kernel's names; names,
            attributes and literals from elsewhere are used unchanged.

    Returns:
        None if something would be computed twice or not at all, or if the order of calls would change.
    """
    *before, last = statements
    builder = _Builder(taken, kernel)
    originals: list[ast.AST] = []
    for statement in before:
        name, assigned = binding(statement)
        if assigned is None or _opaque(statement):
            return None
        builder.known[name] = builder.build(assigned)
        originals += _computed(assigned)
    value = getattr(last, "value", None)
    if not isinstance(value, ast.expr) or _opaque(last):
        return None
    result = builder.build(value)
    originals += _computed(value)
    if taken is not None and operands is not None:
        whole = builder.built.get(taken)
        foreign = any(node not in builder.built and any(_computed(node)) for node in operands.values())
        if whole is None or foreign:
            return None
        inputs = {name: builder.built.get(node, node) for name, node in operands.items()}
        fused = {builder.upstream[node] for node in _computed(whole, stop=inputs.values())}
        originals = [node for node in originals if node not in fused]
        _fill(builder.call, inputs, [builder.built[node] for node in originals])
    rebuilt = [
        node for computation in _computed(result) if (node := builder.upstream.get(computation)) is not None
    ]
    calls = [node for node in rebuilt if isinstance(node, ast.Call)]
    kept = calls == [node for node in originals if isinstance(node, ast.Call)]
    return result if kept and not builder.skips and Counter(rebuilt) == Counter(originals) else None


def kernel_call(whole: ast.expr, kernel: str) -> ast.Call:
    """The kernel's call in a result of `put_together`."""
    return next(call for call in calls_in(whole) if getattr(call.func, "id", "") == kernel)


def called(whole: ast.expr, kernel: str, name: str) -> ast.expr:
    """The argument ``name`` of the kernel's call in a result of `put_together`, or its first argument."""
    call = kernel_call(whole, kernel)
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None) or call.args[0]


def at_hand(node: ast.expr) -> str | None:
    """The name of a tensor in an expression, by which the slot selects a kernel; None if there is none."""
    if isinstance(node, ast.Name):
        return node.id
    inner: list[ast.expr] = []
    if isinstance(node, ast.Call):
        inner = [*node.args[:1], *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    elif isinstance(node, ast.BinOp):
        inner = [node.left, node.right]
    elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
        # ``parts[0]`` is a tensor, but ``parts`` is not.
        inner = [node.value]
    return next((name for operand in inner if (name := at_hand(operand)) is not None), None)


class _Builder:
    """Copies expressions and replaces names by the values assigned to them, and ``taken`` by a call."""

    def __init__(self, taken: ast.expr | None, kernel: str) -> None:
        self.taken = taken
        self.call = ast.Call(ast.Name(kernel, ast.Load()), [], [])
        self.known: dict[str, ast.expr] = {}
        self.built: dict[ast.AST, ast.expr] = {}
        self.upstream: dict[ast.AST, ast.AST] = {}
        #: Whether a computation was moved to a place that is not always evaluated.
        self.skips = False
        self._depth = 0

    def build(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Name) and node.id in self.known:
            rebuilt = self.known[node.id]
            self.skips |= self._depth > 0 and any(True for _ in _computed(rebuilt))
        else:
            self._depth += isinstance(node, _LAZY)
            rebuilt = self._copy(node)
            self._depth -= isinstance(node, _LAZY)
            self.upstream[rebuilt] = node
        self.built[node] = rebuilt
        return self.call if node is self.taken else rebuilt

    def _copy(self, node: _Node) -> _Node:
        clone = copy.copy(node)
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(clone, field, [self._part(item) for item in value])
            else:
                setattr(clone, field, self._part(value))
        return clone

    def _part(self, value: object) -> object:
        if isinstance(value, ast.expr):
            return self.build(value)
        return self._copy(value) if isinstance(value, ast.AST) else value


def _computed(node: ast.AST, stop: Iterable[ast.AST] = ()) -> Iterator[ast.AST]:
    """The computations in an expression, in order, without those inside ``stop``."""
    if any(node is excluded for excluded in stop):
        return
    for child in child_nodes(node):
        yield from _computed(child, stop)
    if isinstance(node, _COMPUTES):
        yield node


def _fill(call: ast.Call, operands: Mapping[str, ast.expr], order: Sequence[ast.expr]) -> None:
    """Let a call evaluate its operands in the given order, by keywords if necessary."""
    position: dict[ast.AST, int] = {node: number for number, node in enumerate(order)}
    places = {
        name: min(
            (position.get(computation, len(order)) for computation in _computed(node)), default=len(order)
        )
        for name, node in operands.items()
    }
    computed = [place for place in places.values() if place < len(order)]
    if computed == sorted(computed):
        call.args = list(operands.values())
    else:
        names = sorted(operands, key=lambda name: places[name])
        call.keywords = [ast.keyword(name, operands[name]) for name in names]


def _opaque(node: ast.AST) -> bool:
    return any(isinstance(descendant, _OPAQUE) for descendant in walk_ast(node))
