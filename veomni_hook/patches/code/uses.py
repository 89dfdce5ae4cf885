"""Find the module-level names that a module uses and binds, from its syntax tree alone.

A name counts as used if it refers to the module's global, and not if a parameter, a local or the variable of
a comprehension hides it. Quoted annotations count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from veomni_hook.patches.code.scope import local_names, parameter_names
from veomni_hook.patches.code.walk import child_nodes, walk_ast

__all__ = ["Use", "global_bindings", "global_uses", "has_star_import"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Use:
    """A use of a global name; the node has the position."""

    name: str
    node: ast.expr | ast.stmt


def global_uses(tree: ast.Module, names: Iterable[str]) -> list[Use]:
    """Every use of one of the module-level ``names``, in text order."""
    wanted = frozenset(names)
    found = [use for node in tree.body for use in _uses(node, wanted, wanted)]
    return sorted(found, key=lambda use: (use.node.lineno, use.node.col_offset))


def global_bindings(tree: ast.Module) -> set[str]:
    """Every name that the module binds at top level or by ``global``, including in branches."""
    module = ast.FunctionDef(name="", args=_no_arguments(), body=tree.body, decorator_list=[])
    names = set(local_names(module))
    for node in walk_ast(tree):
        if isinstance(node, ast.Global):
            names.update(node.names)
    return names


def has_star_import(tree: ast.Module) -> bool:
    """Whether the module uses ``import *``, so that its text does not show all of its names."""
    return any(
        alias.name == "*"
        for node in walk_ast(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


def _uses(node: ast.AST, visible: frozenset[str], wanted: frozenset[str]) -> Iterator[Use]:
    """Yield uses in ``node``; ``visible`` are the wanted names that refer to the global here."""
    if isinstance(node, ast.Name):
        if node.id in visible and not isinstance(node.ctx, ast.Store):
            yield Use(node.id, node)
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        if node.target.id in visible:
            yield Use(node.target.id, node.target)
        yield from _uses(node.value, visible, wanted)
    elif isinstance(node, _FUNCTIONS):
        arguments = node.args
        outside = [*node.decorator_list, *arguments.defaults, *(d for d in arguments.kw_defaults if d)]
        yield from _each(outside, visible, wanted)
        yield from _annotations(node, visible, wanted)
        declared = {name for n in walk_ast(node) if isinstance(n, ast.Global) for name in n.names}
        inner = (visible - local_names(node)) | (declared & wanted)
        yield from _each(node.body, inner, wanted)
    elif isinstance(node, ast.Lambda):
        yield from _each([*node.args.defaults, *(d for d in node.args.kw_defaults if d)], visible, wanted)
        yield from _uses(node.body, visible - parameter_names(node), wanted)
    elif isinstance(node, _COMPREHENSIONS):
        bound = {n.id for g in node.generators for n in walk_ast(g.target) if isinstance(n, ast.Name)}
        yield from _uses(node.generators[0].iter, visible, wanted)
        inner = visible - bound
        parts = [child for child in child_nodes(node) if not isinstance(child, ast.comprehension)]
        yield from _each(parts, inner, wanted)
        for number, generator in enumerate(node.generators):
            yield from _each([*([generator.iter] if number else []), *generator.ifs], inner, wanted)
    elif isinstance(node, ast.AnnAssign):
        yield from _annotation(node.annotation, visible, wanted)
        yield from _each([n for n in (node.target, node.value) if n is not None], visible, wanted)
    else:
        yield from _each(child_nodes(node), visible, wanted)


def _each(nodes: Iterable[ast.AST], visible: frozenset[str], wanted: frozenset[str]) -> Iterator[Use]:
    for node in nodes:
        yield from _uses(node, visible, wanted)


def _annotations(
    node: ast.FunctionDef | ast.AsyncFunctionDef, visible: frozenset[str], wanted: frozenset[str]
) -> Iterator[Use]:
    arguments = node.args
    given = [
        *arguments.posonlyargs,
        *arguments.args,
        arguments.vararg,
        *arguments.kwonlyargs,
        arguments.kwarg,
    ]
    annotations = [a.annotation for a in given if a is not None and a.annotation is not None]
    for annotation in (*annotations, *([node.returns] if node.returns else [])):
        yield from _annotation(annotation, visible, wanted)


def _annotation(node: ast.expr, visible: frozenset[str], wanted: frozenset[str]) -> Iterator[Use]:
    yield from _uses(node, visible, wanted)
    for child in _outside_literals(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            try:
                quoted = ast.parse(child.value.strip(), mode="eval").body
            except SyntaxError:
                continue
            for use in _annotation(quoted, visible, wanted):
                yield Use(use.name, child)


def _outside_literals(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, ast.Subscript):
        value = node.value
        named = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
        if named == "Literal":
            return
    for child in child_nodes(node):
        yield from _outside_literals(child)


def _no_arguments() -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
