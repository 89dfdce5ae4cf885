"""The canonical form of a function."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from veomni_hook.patches.graph.interpreter.inline import entered, receiver_name
from veomni_hook.patches.graph.nodes import Node, walk
from veomni_hook.patches.graph.normal_forms import renewed
from veomni_hook.patches.graph.scope import Scope
from veomni_hook.patches.graph.interpreter.state import Trace, UnclearError
from veomni_hook.patches.graph.interpreter.statements import run
from veomni_hook.patches.structure.scope import parameter_names
from veomni_hook.patches.text.document import FunctionNode
from veomni_hook.patterns import pattern_source

__all__ = ["Form", "Leaf", "Unknown", "branches", "canonical", "decided", "reference_form", "reference_scope"]

_MOST_TESTS = 6


@dataclass(frozen=True, slots=True)
class Form:
    """What a function computes.

    Attributes:
        arguments: its parameters, in order, without ``self``.
        result: its return value.
        effects: its side effects, in order: attributes that it sets, calls whose result it does not use.
        inlined: the functions and methods (``Class.name``) of the file that were followed.
        receiver: the method's name for its instance; empty for a function.
        lineno: the line of the function.
    """

    arguments: tuple[str, ...]
    result: Node
    effects: tuple[Node, ...] = ()
    inlined: tuple[str, ...] = ()
    receiver: str = ""
    lineno: int = 0


@dataclass(frozen=True, slots=True)
class Unknown:
    """The reason why a function has no form, and the line of the code that prevents it."""

    reason: str
    lineno: int = 0


@dataclass(frozen=True, slots=True)
class Leaf:
    """The value that is computed if ``tests`` have these outcomes."""

    tests: tuple[tuple[Node, bool], ...]
    node: Node


def canonical(
    function: FunctionNode,
    scope: Scope,
    owner: ast.ClassDef | None = None,
    *,
    body: Sequence[ast.stmt] | None = None,
) -> Form | Unknown:
    """The form of a function.

    Args:
        function: the function, or method of ``owner``.
        scope: the names of its module.
        owner: the class of ``self``.
        body: follow only these statements; names that the other statements bind are unknown then.
    """
    if body is not None:
        return _made(function, scope, owner, body)
    key = (id(function), id(owner))
    found = scope.cache.get(key)
    if found is None:
        found = scope.cache[key] = _made(function, scope, owner, function.body)
    assert isinstance(found, Form | Unknown)  # noqa: S101
    return found


@cache
def reference_form(path: str, function: str) -> Form:
    """The form of a reference function, from its source text.

    A parameter annotated as a Callable is a function of one tensor that keeps dtype and shape.

    Args:
        path: the file, from the package's root: ``kernels/rms_norm/reference.py``.
        function: its name.

    Raises:
        ValueError: there is no such function, or it has no form.
    """
    scope = reference_scope(path)
    if function not in scope.functions:
        raise ValueError(f"{path} defines no function {function}")
    form = _made(scope.functions[function], scope, None, scope.functions[function].body, reference=True)
    if isinstance(form, Unknown):
        raise ValueError(f"{function} in {path}, line {form.lineno}: {form.reason}")
    return form


def branches(form: Form | Node) -> list[Leaf]:
    """Every formula that tests choose between, with the tests' outcomes; one leaf if there are no tests.

    Only tests that affect the result count; a test that another one makes redundant is omitted. With more
    than six tests the whole node is one leaf.
    """
    node = form.result if isinstance(form, Form) else form
    leaves: list[Leaf] = []
    todo: list[Leaf] = [Leaf((), node)]
    while todo:
        leaf = todo.pop(0)
        first = next((inner for inner in walk(leaf.node) if inner.op == "branch"), None)
        if first is None:
            leaves.append(leaf)
            continue
        if len(leaf.tests) == _MOST_TESTS:
            return [Leaf((), node)]
        test = first.args[0]
        for outcome in (True, False):
            todo.append(Leaf((*leaf.tests, (test, outcome)), decided(leaf.node, test, outcome=outcome)))
    return leaves


def decided(node: Node, test: Node, *, outcome: bool) -> Node:
    """The graph for this outcome of ``test``."""
    done: dict[bytes, Node] = {}

    def visit(current: Node) -> Node:
        found = done.get(current.key)
        if found is None:
            if current.op == "branch" and current.args[0] == test:
                found = visit(current.args[1 if outcome else 2])
            else:
                args = tuple(visit(argument) for argument in current.args)
                kept = all(new is old for new, old in zip(args, current.args, strict=True))
                found = current if kept else renewed(Node(current.op, args, current.value, current.origin))
            done[current.key] = found
        return found

    return visit(node)


@cache
def reference_scope(path: str) -> Scope:
    """The names of a pattern file; ``path`` from the package's root."""
    return Scope(ast.parse(pattern_source(path)))


def _made(
    function: FunctionNode,
    scope: Scope,
    owner: ast.ClassDef | None,
    body: Sequence[ast.stmt],
    *,
    reference: bool = False,
) -> Form | Unknown:
    if isinstance(function, ast.AsyncFunctionDef):
        return Unknown("an async function is not followed", function.lineno)
    static = any(getattr(decorator, "id", "") == "staticmethod" for decorator in function.decorator_list)
    receiver = receiver_name(function) if owner is not None and not static else ""
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, spec.vararg, *spec.kwonlyargs, spec.kwarg]
    names = tuple(p.arg for p in named if p is not None and p.arg != receiver)
    values = {name: Node("argument", (), name) for name in parameter_names(function)}
    for parameter in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if reference else ():
        if parameter.annotation is not None and "Callable" in ast.unparse(parameter.annotation):
            values[parameter.arg].facts["elementwise"] = None
    if receiver:
        values[receiver] = Node("self")
    frame = entered(function, values, 0)
    frame.owner, frame.home, frame.receiver = owner, owner, receiver
    trace = Trace(scope)
    try:
        result = run(body, frame, trace) or Node("constant")
    except UnclearError as error:
        return Unknown(error.reason, error.lineno or function.lineno)
    seen = {node.key for node in walk(result, *trace.effects)}
    dropped = [made for made in trace.calls if made.key not in seen]
    return Form(names, result, (*trace.effects, *dropped), tuple(trace.inlined), receiver, function.lineno)
