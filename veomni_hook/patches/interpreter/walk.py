"""Follow statements and expressions in order: assignments go into later uses, `if` splits and joins.

For calls of functions of the same file, `bound` gives the arguments to the parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import defaults
from veomni_hook.patches.code.tree import last_name
from veomni_hook.patches.interpreter.domain import Frame, UnclearError
from veomni_hook.patches.site import Missed

__all__ = [
    "Bound",
    "assign",
    "bound",
    "conditional",
    "evaluate",
    "may_leave",
    "receiver_name",
    "run",
    "super_name",
]

V = TypeVar("V")

_LEAVES = (ast.Assert, ast.Return, ast.Raise, ast.Continue, ast.Break)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def run(statements: Sequence[ast.stmt], frame: Frame[V]) -> V | None:
    """Follow statements.

    Returns:
        What they return; None if they reach their end or a `continue`, with the values in ``frame``.

    Raises:
        Missed: something cannot be followed.
    """
    domain = frame.domain
    for number, statement in enumerate(statements):
        domain.step(statement)
        if isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break):
            return _leave(statement, frame)
        if isinstance(statement, ast.If | ast.Assert):
            if domain.knows(statement, frame):
                continue
            leaves = may_leave(statement)
            result = _branch(statement, statements[number + 1 :] if leaves else (), frame, leaves=leaves)
            if leaves:
                return result
        elif isinstance(statement, ast.With):
            frame.contexts += 1
            result = domain.within(statement.items, frame, statement.body)
            frame.contexts -= 1
            if result is not None:
                return result
        else:
            _follow(statement, frame)
    return None


def _leave(statement: ast.Return | ast.Raise | ast.Continue | ast.Break, frame: Frame[V]) -> V | None:
    domain = frame.domain
    if isinstance(statement, ast.Return):
        return evaluate(statement.value, frame) if statement.value else domain.constant(None)
    if isinstance(statement, ast.Raise):
        return domain.raised()
    if isinstance(statement, ast.Break):
        domain.statement(statement, frame)
    return None


def may_leave(statement: ast.stmt) -> bool:
    """Whether a statement may leave its block."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if isinstance(node, _LEAVES):
            return True
        if isinstance(node, ast.For | ast.While):
            # `break` and `continue` leave only the inner loop; the loop itself refuses a return.
            continue
        todo.extend(
            child for child in ast.iter_child_nodes(node) if not isinstance(child, (*_SCOPES, ast.expr))
        )
    return False


def _branch(
    statement: ast.If | ast.Assert, rest: Sequence[ast.stmt], frame: Frame[V], *, leaves: bool
) -> V | None:
    """Follow each side of an `if`, and the ``rest`` of the function or loop if a side may leave the block.

    If the sides are blocks of their own, the domain may leave out one that cannot be followed.
    """
    if isinstance(statement, ast.If):
        met, unmet = [*statement.body, *rest], [*statement.orelse, *rest]
    else:
        met, unmet = [*rest], [ast.Raise()]
    domain = frame.domain
    test = domain.test(statement.test, frame)
    if isinstance(test, bool):
        return run(met if test else unmet, frame)
    sides = frame.fork(), frame.fork()
    results: list[V | None] = []
    left_out = False
    for outcome, block, side in zip((True, False), (met, unmet), sides, strict=True):
        domain.assume(statement.test, outcome, side)
        try:
            results.append(run(block, side))
        except Missed as error:
            if leaves or left_out:
                raise
            results.append(domain.left_out(error, statement.test, block, side))
            left_out = True
    domain.join(frame, test, sides, results)
    return domain.left(test, results, statement, frame) if leaves and results != [None, None] else None


def _follow(statement: ast.stmt, frame: Frame[V]) -> None:
    """A statement that neither branches nor leaves its block."""
    domain = frame.domain
    match statement:
        case ast.Pass() | ast.AnnAssign(value=None) | ast.Expr(value=ast.Constant()):
            return
        case ast.Assign(targets=targets, value=source):
            value = evaluate(source, frame)
            for target in targets:
                assign(target, value, frame)
        case ast.AnnAssign(target=target, value=ast.expr() as source):
            assign(target, evaluate(source, frame), frame)
        case ast.AugAssign():
            domain.augmented(statement, frame)
        case ast.Expr(value=expression):
            evaluate(expression, frame)
        case ast.For():
            domain.loop(statement, frame)
        case _:
            domain.statement(statement, frame)


def assign(target: ast.expr, value: V, frame: Frame[V]) -> None:
    """Store a value in ``frame``, or where the domain says.

    Raises:
        Missed: other code may see the change, or the value cannot be unpacked.
    """
    if isinstance(target, ast.Name):
        if frame.local and target.id not in frame.local:
            raise UnclearError(f"{target.id} is not local", target)
        frame.values[target.id] = value
    elif isinstance(target, ast.Starred):
        assign(target.value, value, frame)
    elif isinstance(target, ast.Tuple | ast.List):
        for inner, part in zip(target.elts, frame.domain.unpacked(value, target.elts), strict=True):
            assign(inner, part, frame)
    else:
        frame.domain.store(target, value, frame)


def evaluate(node: ast.expr, frame: Frame[V]) -> V:
    """The value of an expression.

    Raises:
        Missed: it does something that the domain does not express.
    """
    domain = frame.domain
    handler = _EXPRESSIONS.get(type(node))
    try:
        value: V = domain.other(node, frame) if handler is None else handler(node, frame)
    except Missed as error:
        return domain.unclear(error, node)
    domain.step(node, value)
    return value


def _name(node: ast.Name, frame: Frame[V]) -> V:
    domain, value = frame.domain, frame.values.get(node.id)
    return domain.free(node, frame) if value is None or value is domain.unbound else value


def _binary(node: ast.BinOp, frame: Frame[V]) -> V:
    return frame.domain.binary(node.op, evaluate(node.left, frame), evaluate(node.right, frame), node)


def _compare(node: ast.Compare, frame: Frame[V]) -> V:
    return frame.domain.compare([evaluate(part, frame) for part in (node.left, *node.comparators)], node)


def _choice(node: ast.IfExp, frame: Frame[V]) -> V:
    test = frame.domain.test(node.test, frame)
    if isinstance(test, bool):
        return evaluate(node.body if test else node.orelse, frame)
    return frame.domain.branch(test, conditional(node.body, frame), conditional(node.orelse, frame), node)


def conditional(node: ast.expr, frame: Frame[V]) -> V:
    """The value of an expression that runs only in some cases, so it must not change any value."""
    domain = frame.domain
    before = domain.changes, len(frame.effects)
    value = evaluate(node, frame)
    if before != (domain.changes, len(frame.effects)):
        raise UnclearError("an expression that runs only in some cases changes a value", node, writes=True)
    return value


def _walrus(node: ast.NamedExpr, frame: Frame[V]) -> V:
    value = evaluate(node.value, frame)
    frame.values[node.target.id] = value
    frame.domain.changes += 1
    return value


_EXPRESSIONS: dict[type[ast.expr], Callable[..., Any]] = {
    ast.Constant: lambda node, frame: frame.domain.constant(node.value, node),
    ast.Name: _name,
    ast.Attribute: lambda node, frame: frame.domain.attribute(evaluate(node.value, frame), node, frame),
    ast.BinOp: _binary,
    ast.UnaryOp: lambda node, frame: frame.domain.unary(evaluate(node.operand, frame), node),
    ast.Compare: _compare,
    ast.BoolOp: lambda node, frame: frame.domain.logic(node, frame),
    ast.IfExp: _choice,
    ast.Tuple: lambda node, frame: frame.domain.sequence(node, frame),
    ast.List: lambda node, frame: frame.domain.sequence(node, frame),
    ast.Subscript: lambda node, frame: frame.domain.subscript(evaluate(node.value, frame), node, frame),
    ast.NamedExpr: _walrus,
    ast.Call: lambda node, frame: frame.domain.call(node, frame),
}


@dataclass(slots=True)
class Bound(Generic[V]):
    """What a call gives to the parameters of a function.

    Attributes:
        values: by name.
        defaults: the parameters without a value, each with its default, or None.
        rest: positional arguments beyond the parameters.
        others: keyword arguments that are no parameters.
        repeated: whether a keyword names a parameter that has a value.
    """

    values: dict[str, V]
    defaults: dict[str, ast.expr | None] = field(default_factory=dict)
    rest: list[V] = field(default_factory=list)
    others: dict[str, V] = field(default_factory=dict)
    repeated: bool = False


def bound(function: FunctionNode, positional: Sequence[V], keywords: dict[str, V]) -> Bound[V]:
    """Bind the arguments of a call."""
    known = defaults(function)
    names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    result = Bound(dict(zip(names, positional, strict=False)), rest=list(positional[len(names) :]))
    for name, value in keywords.items():
        result.repeated |= name in result.values
        (result.values if name in known else result.others)[name] = value
    result.defaults = {name: default for name, default in known.items() if name not in result.values}
    return result


def super_name(function: ast.expr) -> str:
    """The name of the method that ``super().name`` refers to; empty for other code."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
        if not function.value.args and last_name(function.value.func) == "super":
            return function.attr
    return ""


def receiver_name(function: FunctionNode) -> str:
    """The method's name for its instance."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    return parameters[0].arg if parameters else ""
