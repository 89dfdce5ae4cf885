"""The canonical form of a function: its result and effects as nodes, or why it has none.

`canonical` returns that of upstream's code, `reference_form` that of a function of a kernel's reference file;
`recognised` matches code against the functions of such a file.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import local_names, parameters
from veomni_hook.patches.code.tree import binding
from veomni_hook.patches.graph.formula import Formula
from veomni_hook.patches.graph.matching import ANY, Difference, Match, Rule, find, match
from veomni_hook.patches.graph.nodes import Form, Node, brief, constant, walk
from veomni_hook.patches.graph.scope import Scope
from veomni_hook.patches.interpreter.domain import Frame, UnclearError
from veomni_hook.patches.interpreter.walk import receiver_name, run
from veomni_hook.patches.reasons import Reason
from veomni_hook.patterns import combinations, pattern_file, pattern_source

__all__ = [
    "canonical",
    "layouts",
    "recognised",
    "reference_form",
    "reference_names",
    "reference_scope",
    "specific_first",
    "variant_names",
]


def canonical(
    function: FunctionNode,
    scope: Scope,
    owner: ast.ClassDef | None = None,
    *,
    body: Sequence[ast.stmt] | None = None,
) -> Form | Reason:
    """The form of a function, or the reason why it has none, with the line of the code that prevents it.

    Args:
        function: the function, or method of ``owner``.
        scope: the names of its module.
        owner: the class of ``self``.
        body: follow only these statements; names that the other statements bind are unknown then.
    """
    key = (id(function), id(owner))
    if body is None and key in scope.cache:
        return scope.cache[key]
    form: Form | Reason
    try:
        form = _interpreted(function, scope, owner, function.body if body is None else body)
    except UnclearError as error:
        form = error.at(function).reason
    if body is None:
        scope.cache[key] = form
    return form


def _interpreted(
    function: FunctionNode,
    scope: Scope,
    owner: ast.ClassDef | None,
    body: Sequence[ast.stmt],
    *,
    activations: bool = False,
    records: Mapping[str, Mapping[str, Hashable]] | None = None,
) -> Form:
    """The form of statements of a function.

    Args:
        records: parameters whose attributes are known, which are no arguments of the form.
        activations: a parameter annotated as a Callable keeps the dtype and shape of one tensor, and one
            annotated as an nn.Parameter has as many dimensions as an attribute: nobody knows how many.

    Raises:
        UnclearError: it has none.
    """
    if isinstance(function, ast.AsyncFunctionDef):
        raise UnclearError("an async function is not followed", function)
    static = any(getattr(decorator, "id", "") == "staticmethod" for decorator in function.decorator_list)
    receiver = receiver_name(function) if owner is not None and not static else ""
    records = records or {}
    names = tuple(p.arg for p in parameters(function) if p.arg != receiver and p.arg not in records)
    values = {p.arg: Node("argument", (), p.arg) for p in parameters(function)}
    for parameter in parameters(function) if activations else ():
        annotation = "" if parameter.annotation is None else ast.unparse(parameter.annotation)
        if "Callable" in annotation:
            values[parameter.arg].facts["elementwise"] = None
        elif annotation.endswith("nn.Parameter"):
            values[parameter.arg].facts["dimension"] = constant(None)
    for name, attributes in records.items():
        values[name] = Node("record", (), tuple(attributes.items()))
    if receiver:
        values[receiver] = Node("self")
    domain = Formula(scope)
    frame = Frame(domain, values, local_names(function), owner=owner, home=owner)
    result = run(body, frame) or Node("constant")
    used = {node.key for node in walk(result, *frame.effects)}
    unused = [call for call in domain.trace.calls if call.key not in used]
    return Form(names, result, (*frame.effects, *unused), tuple(domain.followed), receiver, function.lineno)


@cache
def variant_names(op: str) -> tuple[str, ...]:
    """The variants of an op, in the order of its table, which is read as text: no kernel is imported."""
    table = _declared(op, "VARIANTS")
    assert isinstance(table, ast.Dict)  # noqa: S101
    return tuple(ast.literal_eval(key) for key in table.keys if key is not None)


@cache
def layouts(op: str) -> Mapping[str, Mapping[str, Hashable]]:
    """What every combination of an op's ``AXES`` means, by name; those with a row in its table first."""
    named = variant_names(op)
    combined = combinations(ast.literal_eval(_declared(op, "AXES")))
    return dict(sorted(combined.items(), key=lambda item: item[0] not in named))


def _declared(op: str, wanted: str) -> ast.expr:
    """The value of a name in an op's ``variants.py``."""
    path = pattern_file(op, "variants.py")
    for node in ast.parse(pattern_source(path)).body:
        name, value = binding(node)
        if name == wanted and value is not None:
            return value
    raise ValueError(f"{path} has no table {wanted}")


@cache
def reference_names(path: str) -> tuple[str, ...]:
    """The functions of a reference file that are a variant's formula, sorted.

    ``variant__words`` is `variant` in other words.

    Args:
        path: the file, from the package's root: ``kernels/rms_norm/reference.py``.
    """
    variants = variant_names(path.split("/")[1])
    functions = reference_scope(path).functions
    return tuple(sorted(name for name in functions if name.partition("__")[0] in variants))


@cache
def specific_first(op: str) -> tuple[str, ...]:
    """The variants of an op, the larger formulas first: a smaller one may be a part of them."""
    path = pattern_file(op)
    sizes = {name: len([*walk(reference_form(path, name).result)]) for name in variant_names(op)}
    return tuple(sorted(sizes, key=lambda name: -sizes[name]))


@cache
def reference_scope(path: str) -> Scope:
    """The names of a reference file; ``path`` from the package's root."""
    return Scope(ast.parse(pattern_source(path)))


@cache
def reference_form(path: str, function: str, layout: str = "") -> Form:
    """The form of a reference function, from its source text.

    With a layout, that of a function of all `layouts`: its parameter ``layout`` is this one, and operands
    that this one does not use are no arguments.

    A parameter annotated as a Callable is a function of one tensor that keeps dtype and shape; one annotated
    as an nn.Parameter may have no dimension, as an attribute.

    Args:
        path: the file, from the package's root: ``kernels/rms_norm/reference.py``.
        function: its name.
        layout: the name of one of the op's `layouts`.

    Raises:
        ValueError: there is no such function, or it has no form.
    """
    scope = reference_scope(path)
    node = scope.functions.get(function)
    if node is None:
        raise ValueError(f"{path} defines no function {function}")
    records = {"layout": layouts(path.split("/")[1])[layout]} if layout else None
    try:
        form = _interpreted(node, scope, None, node.body, activations=True, records=records)
    except UnclearError as error:
        line = error.at(node).reason.line
        raise ValueError(f"{function} in {path}, line {line}: {error.args[0]}") from error
    if not layout:
        return form
    used = {inner.value for inner in walk(form.result) if inner.op == "argument"}
    return replace(form, arguments=tuple(name for name in form.arguments if name in used))


def recognised(
    path: str,
    form: Form | Reason,
    rules: Mapping[str, Rule],
    *,
    names: Sequence[str] = (),
    otherwise: Rule = ANY,
) -> tuple[str, Match] | Difference:
    """The first formula of a reference file that matches a form.

    Args:
        path: the reference file.
        form: what upstream's code computes; the reason why it is unknown matches no formula.
        rules: what operands may match, by their names.
        names: the functions to try, in this order; by default the formulas of all variants.
        otherwise: the rule for operands that ``rules`` does not name.

    Returns:
        The function's name and the match, or the difference to the nearest formula.
    """
    if isinstance(form, Reason):
        return Difference(str(form), 0.0, form.line)
    names = names or reference_names(path)
    nearest = Difference("", -1.0)
    for name in names:
        pattern = reference_form(path, name)
        result = match(pattern, form, {hole: rules.get(hole, otherwise) for hole in pattern.arguments})
        if isinstance(result, Match):
            return name, result
        if result.depth > nearest.depth:
            nearest = Difference(f"nearest is {name}: {result.text}", result.depth, result.lineno)
    if nearest.depth > 0:
        return nearest
    for name in names:
        pattern = reference_form(path, name)
        if any(find(pattern, form, {hole: rules.get(hole, otherwise) for hole in pattern.arguments})):
            line = form.result.lineno
            text = f"nearest is {name}: expected nothing after it, found {brief(form.result)} (line {line})"
            return Difference(text, 0.0, line)
    return nearest
