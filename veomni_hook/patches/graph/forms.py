"""The canonical form of a function: its result and effects as nodes, or why it has none."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import local_names, parameter_names
from veomni_hook.patches.graph.formula import Formula
from veomni_hook.patches.graph.nodes import Node, constant, walk
from veomni_hook.patches.graph.scope import Scope
from veomni_hook.patches.interpreter.domain import Frame, UnclearError
from veomni_hook.patches.interpreter.functions import receiver_name
from veomni_hook.patches.interpreter.walk import run
from veomni_hook.patches.reasons import Code, Reason

__all__ = ["Form", "Unknown", "canonical", "interpreted"]


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

    @property
    def why(self) -> Reason:
        """It as the reason of a site, with the line."""
        return Reason(self.reason, Code.NOT_FOLLOWED, self.lineno)


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
        return interpreted(function, scope, owner, body)
    key = (id(function), id(owner))
    form = scope.cache.get(key)
    if form is None:
        form = scope.cache[key] = interpreted(function, scope, owner, function.body)
    assert isinstance(form, Form | Unknown)  # noqa: S101
    return form


def interpreted(
    function: FunctionNode,
    scope: Scope,
    owner: ast.ClassDef | None,
    body: Sequence[ast.stmt],
    *,
    activations: bool = False,
) -> Form | Unknown:
    """The form of statements of a function, as `canonical` returns it, without a cache.

    Args:
        activations: a parameter annotated as a Callable keeps the dtype and shape of one tensor, and one
            annotated as an nn.Parameter has as many dimensions as an attribute: nobody knows how many.
    """
    if isinstance(function, ast.AsyncFunctionDef):
        return Unknown("an async function is not followed", function.lineno)
    static = any(getattr(decorator, "id", "") == "staticmethod" for decorator in function.decorator_list)
    receiver = receiver_name(function) if owner is not None and not static else ""
    spec = function.args
    parameters = [*spec.posonlyargs, *spec.args, spec.vararg, *spec.kwonlyargs, spec.kwarg]
    names = tuple(p.arg for p in parameters if p is not None and p.arg != receiver)
    values = {name: Node("argument", (), name) for name in parameter_names(function)}
    for parameter in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if activations else ():
        annotation = "" if parameter.annotation is None else ast.unparse(parameter.annotation)
        if "Callable" in annotation:
            values[parameter.arg].facts["elementwise"] = None
        elif annotation.endswith("nn.Parameter"):
            values[parameter.arg].facts["dimension"] = constant(None)
    if receiver:
        values[receiver] = Node("self")
    domain = Formula(scope)
    frame = Frame(domain, values, local_names(function))
    frame.owner = frame.home = owner
    try:
        result = run(body, frame) or Node("constant")
    except UnclearError as error:
        return Unknown(error.words, error.lineno or function.lineno)
    used = {node.key for node in walk(result, *frame.effects)}
    unused = [call for call in domain.trace.calls if call.key not in used]
    return Form(names, result, (*frame.effects, *unused), tuple(domain.followed), receiver, function.lineno)
