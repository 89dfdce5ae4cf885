"""Follow statements in order: assignments are substituted into later uses, `if` splits and joins."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence

from veomni_hook.patches.graph import arithmetic
from veomni_hook.patches.graph.interpreter.calls import write
from veomni_hook.patches.graph.dtypes import is_number
from veomni_hook.patches.graph.interpreter.expressions import binary, evaluate, indices, unpacked
from veomni_hook.patches.graph.nodes import Node
from veomni_hook.patches.graph.interpreter.state import Frame, Trace, UnclearError, merged

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
_RAISED = Node("raise")


def run(statements: Sequence[ast.stmt], frame: Frame, trace: Trace) -> Node | None:
    """Follow statements.

    Returns:
        What they return; None if they reach their end or a `continue`, with the values in ``frame``.

    Raises:
        UnclearError: something cannot be followed.
    """
    for number, statement in enumerate(statements):
        trace.step(statement)
        if isinstance(statement, ast.Return | ast.Raise | ast.Continue):
            return _left(statement, frame, trace)
        if isinstance(statement, ast.If | ast.Assert) and _leaves(statement):
            return _parted(statement, statements[number + 1 :], frame, trace)
        if isinstance(statement, ast.With):
            result = _within(statement, frame, trace)
            if result is not None:
                return result
            continue
        handler = _HANDLERS.get(type(statement))
        if handler is None:
            raise UnclearError(f"{type(statement).__name__} is not followed", statement)
        handler(statement, frame, trace)
    return None


def _left(statement: ast.Return | ast.Raise | ast.Continue, frame: Frame, trace: Trace) -> Node | None:
    if isinstance(statement, ast.Continue):
        return None
    if isinstance(statement, ast.Raise):
        return _RAISED
    return evaluate(statement.value, frame, trace) if statement.value else Node("constant")


def _leaves(statement: ast.stmt) -> bool:
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


def _parted(
    statement: ast.If | ast.Assert, rest: Sequence[ast.stmt], frame: Frame, trace: Trace
) -> Node | None:
    """An `if` with a side that may leave the block: follow each side to the end of the function or loop."""
    test = evaluate(statement.test, frame, trace)
    if isinstance(statement, ast.If):
        ways = ([*statement.body, *rest], [*statement.orelse, *rest])
    else:
        ways = ([*rest], [ast.Raise()])
    if test.op == "constant":
        return run(ways[0 if test.value else 1], frame, trace)
    met, unmet = frame.fork(), frame.fork()
    one, other = _sides(test, trace, lambda: run(ways[0], met, trace), lambda: run(ways[1], unmet, trace))
    frame.values = merged(test, met.values, unmet.values)
    if one is None and other is None:
        return None
    if frame.loops:
        raise UnclearError("a loop is left before its end", statement)
    return arithmetic.branch(test, one or Node("constant"), other or Node("constant"))


def _met_again(statement: ast.If, frame: Frame, trace: Trace) -> None:
    test = evaluate(statement.test, frame, trace)
    if test.op == "constant":
        run(statement.body if test.value else statement.orelse, frame, trace)
        return
    met, unmet = frame.fork(), frame.fork()
    _sides(test, trace, lambda: run(statement.body, met, trace), lambda: run(statement.orelse, unmet, trace))
    frame.values = merged(test, met.values, unmet.values)


def _sides(
    test: Node, trace: Trace, met: Callable[[], Node | None], unmet: Callable[[], Node | None]
) -> tuple[Node | None, Node | None]:
    """Follow both sides; an effect of one side depends on the test."""
    before = len(trace.effects)
    one = met()
    mine = trace.effects[before:]
    del trace.effects[before:]
    other = unmet()
    theirs = trace.effects[before:]
    del trace.effects[before:]
    if mine or theirs:
        trace.effects.append(
            arithmetic.branch(test, Node("effects", tuple(mine)), Node("effects", tuple(theirs)))
        )
    return one, other


def _assign(statement: ast.Assign, frame: Frame, trace: Trace) -> None:
    value = evaluate(statement.value, frame, trace)
    for target in statement.targets:
        _store(target, value, frame, trace)


def _annotated(statement: ast.AnnAssign, frame: Frame, trace: Trace) -> None:
    if statement.value is not None:
        _store(statement.target, evaluate(statement.value, frame, trace), frame, trace)


def _store(target: ast.expr, value: Node, frame: Frame, trace: Trace) -> None:
    if isinstance(target, ast.Name):
        if target.id not in frame.local:
            raise UnclearError(f"{target.id} is not local", target)
        frame.values[target.id] = value
    elif isinstance(target, ast.Starred):
        _store(target.value, value, frame, trace)
    elif isinstance(target, ast.Tuple | ast.List):
        for inner, part in zip(target.elts, unpacked(value, target.elts), strict=True):
            _store(inner, part, frame, trace)
    elif isinstance(target, ast.Subscript):
        old = evaluate(target.value, frame, trace)
        new = Node("setitem", (old, Node("tuple", tuple(indices(target.slice, frame, trace))), value))
        write(target.value, old, new, frame, trace)
    elif isinstance(target, ast.Attribute):
        owner = evaluate(target.value, frame, trace)
        trace.effects.append(Node("setattr", (owner, value), target.attr))
        if owner.op != "self":
            raise UnclearError("an attribute of another object is set", target)
        frame.values[f"self.{target.attr}"] = value


def _augmented(statement: ast.AugAssign, frame: Frame, trace: Trace) -> None:
    target = statement.target
    if not isinstance(target, ast.Name):
        raise UnclearError("something other than a local name is changed in place", statement, writes=True)
    old = evaluate(ast.copy_location(ast.Name(target.id, ast.Load()), target), frame, trace)
    value = evaluate(statement.value, frame, trace)
    new = binary(statement.op, old, value, None)
    if is_number(old) or old.op in ("tuple", "constant", "part", "shape"):
        if old.op == "tuple":
            raise UnclearError("a sequence is changed in place", statement, writes=True)
        frame.values[target.id] = new
    else:
        write(target, old, arithmetic.updated(old, new), frame, trace)


def _expression(statement: ast.Expr, frame: Frame, trace: Trace) -> None:
    if not isinstance(statement.value, ast.Constant):
        evaluate(statement.value, frame, trace)


def _deleted(statement: ast.Delete, frame: Frame, trace: Trace) -> None:
    for target in statement.targets:
        if not isinstance(target, ast.Name):
            raise UnclearError("something other than a local name is deleted", statement, writes=True)
        frame.values.pop(target.id, None)


def _within(statement: ast.With, frame: Frame, trace: Trace) -> Node | None:
    """A block in contexts: what it assigns and returns is computed ``within`` them."""
    contexts = [evaluate(item.context_expr, frame, trace) for item in statement.items]
    for context, item in zip(contexts, statement.items, strict=True):
        called = context.args[0] if context.op == "call" else context
        if called.value not in _CONTEXTS or context.op != "call" or item.optional_vars is not None:
            raise UnclearError("an unknown context", statement)
    before = dict(frame.values)
    result = run(statement.body, frame, trace)
    if result is None and _leaves_block(statement):
        raise UnclearError("a block under a context is left before its end", statement)
    for name, value in frame.values.items():
        if before.get(name) is not value:
            frame.values[name] = _inside(value, contexts)
    return None if result is None else _inside(result, contexts)


def _leaves_block(statement: ast.With) -> bool:
    return any(_leaves(inner) for inner in statement.body)


def _inside(value: Node, contexts: Iterable[Node]) -> Node:
    for context in contexts:
        # Integers and booleans have no gradient anyway.
        if not (_discrete(value) and "grad" in str(context.args[0].value)):
            value = Node("within", (value, context))
    return value


def _discrete(value: Node) -> bool:
    while value.op in ("permute", "transpose", "item", "slice", "unsqueeze", "reshape", "sum"):
        value = value.args[0]
    return value.op in (
        "one_hot",
        "nonzero",
        "eq",
        "lt",
        "le",
        "ne",
        "argmax",
        "size",
        "constant",
    ) or is_number(value)


def _for(statement: ast.For, frame: Frame, trace: Trace) -> None:
    from veomni_hook.patches.graph.interpreter.loops import loop

    loop(statement, frame, trace, run, _store)


def _nothing(statement: ast.Pass, frame: Frame, trace: Trace) -> None:
    """`pass`."""


_HANDLERS: dict[type[ast.stmt], Callable[..., None]] = {
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.Expr: _expression,
    ast.Delete: _deleted,
    ast.For: _for,
    ast.If: _met_again,
    ast.Pass: _nothing,
}
