"""Digests of upstream definitions, the same on every Python release that can parse them.

A digest covers what a definition does: its parameters, defaults and statements. Its own name and decorators,
annotations, docstrings, comments and layout do not count, so a release that only changes those keeps the
digest. `serialise` defines what "the same code" means in this package; patterns use it too.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.document import DefinitionNode, Document
from veomni_hook.patches.code.names import listed, nearest

__all__ = ["check_relies_on", "fingerprint", "serialise", "significant_fields"]

# Ignored: fields that the context determines (ctx, simple), spelling (kind, type_comment) and annotations.
# type_params exists since Python 3.12 and is only for annotations.
_INSIGNIFICANT = frozenset({"annotation", "ctx", "kind", "returns", "simple", "type_comment", "type_params"})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def fingerprint(node: DefinitionNode) -> str:
    """Return the digest of a definition: 16 hexadecimal characters.

    Nested definitions count with their names and decorators. For an assignment only the value counts.
    """
    if isinstance(node, _SCOPES):
        ignored = {"name", "decorator_list"}
        fields = [(name, value) for name, value in significant_fields(node) if name not in ignored]
        text = f"{type(node).__name__}({_fields_text(fields)})"
    else:
        text = serialise(node.value)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def serialise(value: object) -> str:
    """Return a text that is equal for two trees if and only if they are the same code.

    Args:
        value: a node, a list of nodes, or a field's plain value.
    """
    # Names and attributes are two thirds of all nodes; handling them here halves the time of a digest.
    if type(value) is ast.Name:
        return f"Name(id=str:{value.id!a})"
    if type(value) is ast.Attribute:
        return f"Attribute(value={serialise(value.value)},attr=str:{value.attr!a})"
    if isinstance(value, ast.AST):
        return f"{_kind(value)}({_fields_text(significant_fields(value))})"
    if isinstance(value, list):
        return f"[{','.join([serialise(item) for item in value])}]"
    # ascii(), because repr() escapes by the Unicode tables of the running Python.
    return f"{type(value).__name__}:{value!a}"


def significant_fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the fields of ``node`` that determine what it does, without empty ones.

    An annotated assignment has the fields of a plain one. Bare annotations (``x: int``) and docstrings are
    removed from the body that contains them. Adjacent literal parts of an f-string are merged.
    """
    if isinstance(node, ast.AnnAssign):
        yield "targets", [node.target]
        if node.value is not None:
            yield "value", node.value
        return
    for name in node._fields:
        if name in _INSIGNIFICANT or (value := getattr(node, name, None)) is None:
            continue
        if isinstance(value, list):
            value = _significant_items(node, name, value)
            if not value:
                continue
        elif name == "format_spec" and not _merge_literals(value.values):
            continue  # f"{x:}"
        yield name, value


def check_relies_on(document: Document, relies_on: Mapping[str, str | Collection[str]], where: str) -> None:
    """Check that the definitions which a patch relies on have known digests.

    Args:
        document: the module that the patch applies to.
        relies_on: qualified name of a definition in the module to the digests that it may have.
        where: the location for error messages.

    Raises:
        PatchTargetError: a definition is missing or has another digest.
    """
    for name, digests in relies_on.items():
        known = (digests,) if isinstance(digests, str) else tuple(digests)
        found = document.find(name)
        if not found:
            close = nearest(name, (definition.qualname for definition in document.definitions()))
            raise PatchTargetError(
                f"{name}, which the patch relies on, is not defined in {document.module}",
                where=where,
                fix=f"name a definition of that module in relies_on; nearest: {listed(close)}",
                target=name,
                nearest=close,
            )
        for definition in found:
            digest = fingerprint(definition.node)
            if digest not in known:
                line = document.lineno(document.start(definition.node))
                raise PatchTargetError(
                    f"{name} (line {line} of {document.module}) is not the code that the patch relies on: "
                    f"its fingerprint is {digest}, known are {listed(known)}",
                    where=where,
                    fix=f"read the new code; if the patch still holds, add {digest!r} to relies_on[{name!r}]",
                    target=name,
                )


def _kind(node: ast.AST) -> str:
    return "Assign" if isinstance(node, ast.AnnAssign) else type(node).__name__


def _fields_text(fields: Any) -> str:
    return ",".join([f"{name}={serialise(value)}" for name, value in fields])


def _significant_items(node: ast.AST, name: str, items: list[Any]) -> list[Any]:
    if name == "body":
        items = [item for item in items if not (isinstance(item, ast.AnnAssign) and item.value is None)]
        if isinstance(node, _SCOPES) and items and _is_docstring(items[0]):
            items = items[1:]
    elif isinstance(node, ast.JoinedStr):
        items = _merge_literals(items)
    return items


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _merge_literals(parts: list[ast.expr]) -> list[ast.expr]:
    # Python releases split the literal text of f"{x=}" and of joined strings at different positions.
    merged: list[ast.expr] = []
    for part in parts:
        last = merged[-1] if merged else None
        if not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
            merged.append(part)
        elif isinstance(last, ast.Constant) and isinstance(last.value, str):
            merged[-1] = ast.Constant(last.value + part.value)
        elif part.value:
            merged.append(part)
    return merged
