"""Follow statements in order: assignments go into later uses, `if` splits and joins."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence

from veomni_hook.patches.graph import arithmetic
from veomni_hook.patches.graph.dtypes import is_number
from veomni_hook.patches.graph.interpreter.assignment import assign
from veomni_hook.patches.graph.interpreter.expressions import binary, evaluate
from veomni_hook.patches.graph.interpreter.loops import loop
from veomni_hook.patches.graph.interpreter.memory import write
from veomni_hook.patches.graph.interpreter.state import Frame, UnclearError
from veomni_hook.patches.graph.nodes import Node

__all__ = ["run"]

_LEAVES = (ast.Assert, ast.Return, ast.Raise, ast.Continue, ast.Break)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
# Contexts that only change how the code in them computes.
_CONTEXTS = (
    "torch.no_grad",
    "torch.enable_grad",
    "torch.inference_mode",
    "torch.set_grad_enabled",
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
)
# Operations with integer or boolean results.
_DISCRETE = ("one_hot", "nonzero", "eq", "lt", "le", "ne", "argmax", "size", "constant")
_RAISED = Node("raise")


def run(statements: Sequence[ast.stmt], frame: Frame) -> Node | None:
    """Follow statements.

    Returns:
        What they return; None if they reach their end or a `continue`, with the values in ``frame``.

    Raises:
        UnclearError: something cannot be followed.
    """
    for number, statement in enumerate(statements):
        frame.trace.step(statement)
        if isinstance(statement, ast.Return | ast.Raise | ast.Continue):
            return _leave(statement, frame)
        if isinstance(statement, ast.If | ast.Assert) and _may_leave(statement):
            return _split(statement, statements[number + 1 :], frame)
        if isinstance(statement, ast.With):
            result = _with(statement, frame)
            if result is not None:
                return result
            continue
        handler = _HANDLERS.get(type(statement))
        if handler is None:
            raise UnclearError(f"{type(statement).__name__} is not followed", statement)
        handler(statement, frame)
    return None


def _leave(statement: ast.Return | ast.Raise | ast.Continue, frame: Frame) -> Node | None:
    if isinstance(statement, ast.Continue):
        return None
    if isinstance(statement, ast.Raise):
        return _RAISED
    return evaluate(statement.value, frame) if statement.value else Node("constant")


def _may_leave(statement: ast.stmt) -> bool:
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


def _split(statement: ast.If | ast.Assert, rest: Sequence[ast.stmt], frame: Frame) -> Node | None:
    """An `if` with a side that may leave the block: follow each side to the end of the function or loop."""
    test = evaluate(statement.test, frame)
    if isinstance(statement, ast.If):
        met, unmet = [*statement.body, *rest], [*statement.orelse, *rest]
    else:
        met, unmet = [*rest], [ast.Raise()]
    if test.op == "constant":
        return run(met if test.value else unmet, frame)
    one, other = _run_sides(test, met, unmet, frame)
    if one is None and other is None:
        return None
    if frame.loops:
        raise UnclearError("a loop is left before its end", statement)
    return arithmetic.branch(test, one or Node("constant"), other or Node("constant"))


def _if(statement: ast.If, frame: Frame) -> None:
    """An `if` whose sides reach its end."""
    test = evaluate(statement.test, frame)
    if test.op == "constant":
        run(statement.body if test.value else statement.orelse, frame)
    else:
        _run_sides(test, statement.body, statement.orelse, frame)


def _run_sides(
    test: Node, met: Sequence[ast.stmt], unmet: Sequence[ast.stmt], frame: Frame
) -> tuple[Node | None, Node | None]:
    """What both sides return. ``frame`` gets their values; an effect of one side depends on the test."""
    met_frame, unmet_frame = frame.fork(), frame.fork()
    met_result, met_effects = _run_side(met, met_frame)
    unmet_result, unmet_effects = _run_side(unmet, unmet_frame)
    if met_effects.args or unmet_effects.args:
        frame.trace.effects.append(arithmetic.branch(test, met_effects, unmet_effects))
    frame.join(test, met_frame, unmet_frame)
    return met_result, unmet_result


def _run_side(statements: Sequence[ast.stmt], frame: Frame) -> tuple[Node | None, Node]:
    """What statements return, and their effects, which are not recorded."""
    effects = frame.trace.effects
    before = len(effects)
    result = run(statements, frame)
    new = Node("effects", tuple(effects[before:]))
    del effects[before:]
    return result, new


def _assign(statement: ast.Assign, frame: Frame) -> None:
    value = evaluate(statement.value, frame)
    for target in statement.targets:
        assign(target, value, frame)


def _annotated_assign(statement: ast.AnnAssign, frame: Frame) -> None:
    if statement.value is not None:
        assign(statement.target, evaluate(statement.value, frame), frame)


def _augmented_assign(statement: ast.AugAssign, frame: Frame) -> None:
    target = statement.target
    if not isinstance(target, ast.Name):
        raise UnclearError("something other than a local name is changed in place", statement, writes=True)
    old = evaluate(ast.copy_location(ast.Name(target.id, ast.Load()), target), frame)
    value = evaluate(statement.value, frame)
    new = binary(statement.op, old, value, None)
    if is_number(old) or old.op in ("tuple", "constant", "part", "shape"):
        if old.op == "tuple":
            raise UnclearError("a sequence is changed in place", statement, writes=True)
        frame.values[target.id] = new
    else:
        write(target, old, arithmetic.updated(old, new), frame)


def _expression(statement: ast.Expr, frame: Frame) -> None:
    if not isinstance(statement.value, ast.Constant):
        evaluate(statement.value, frame)


def _delete(statement: ast.Delete, frame: Frame) -> None:
    for target in statement.targets:
        if not isinstance(target, ast.Name):
            raise UnclearError("something other than a local name is deleted", statement, writes=True)
        frame.values.pop(target.id, None)


def _with(statement: ast.With, frame: Frame) -> Node | None:
    """A block in contexts: what it assigns and returns is computed ``within`` them."""
    contexts = [evaluate(item.context_expr, frame) for item in statement.items]
    for context, item in zip(contexts, statement.items, strict=True):
        called = context.args[0] if context.op == "call" else context
        if called.value not in _CONTEXTS or context.op != "call" or item.optional_vars is not None:
            raise UnclearError("an unknown context", statement)
    before = dict(frame.values)
    result = run(statement.body, frame)
    if result is None and any(map(_may_leave, statement.body)):
        raise UnclearError("a block under a context is left before its end", statement)
    for name, value in frame.values.items():
        if before.get(name) is not value:
            frame.values[name] = _within(value, contexts)
    return None if result is None else _within(result, contexts)


def _within(value: Node, contexts: Iterable[Node]) -> Node:
    for context in contexts:
        # Integers and booleans have no gradient anyway.
        if not (_is_discrete(value) and "grad" in str(context.args[0].value)):
            value = Node("within", (value, context))
    return value


def _is_discrete(value: Node) -> bool:
    while value.op in ("permute", "transpose", "item", "slice", "unsqueeze", "reshape", "sum"):
        value = value.args[0]
    return value.op in _DISCRETE or is_number(value)


def _pass(statement: ast.Pass, frame: Frame) -> None:
    """`pass`."""


_HANDLERS: dict[type[ast.stmt], Callable[..., None]] = {
    ast.Assign: _assign,
    ast.AnnAssign: _annotated_assign,
    ast.AugAssign: _augmented_assign,
    ast.Expr: _expression,
    ast.Delete: _delete,
    ast.For: loop,
    ast.If: _if,
    ast.Pass: _pass,
}
