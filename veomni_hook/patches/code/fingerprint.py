"""Digests of upstream definitions, the same on every Python release that can parse them.

A digest covers what a definition does: its parameters, defaults and statements. Its own name and decorators,
annotations, docstrings, comments and layout do not count, so a release that only changes those keeps the
digest. `serialise` defines what "the same code" means in this package; patterns use it too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from veomni_hook.patches.code.document import DefinitionNode, is_docstring
from veomni_hook.patches.code.walk import DEFINITIONS

__all__ = ["fingerprint", "means", "serialise", "significant_fields"]

# Ignored: fields that the context determines (ctx, simple), spelling (kind, type_comment) and annotations.
# type_params exists since Python 3.12 and is only for annotations.
_INSIGNIFICANT = frozenset({"annotation", "ctx", "kind", "returns", "simple", "type_comment", "type_params"})


def fingerprint(node: DefinitionNode) -> str:
    """Return the digest of a definition: 16 hexadecimal characters.

    Nested definitions count with their names and decorators. For an assignment only the value counts.
    """
    if isinstance(node, DEFINITIONS):
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


def means(text: str, tree: ast.AST) -> bool:
    """Whether ``text`` parses to the same code as the module ``tree``."""
    try:
        return serialise(ast.parse(text)) == serialise(tree)
    except SyntaxError:
        return False


def _kind(node: ast.AST) -> str:
    return "Assign" if isinstance(node, ast.AnnAssign) else type(node).__name__


def _fields_text(fields: Any) -> str:
    return ",".join([f"{name}={serialise(value)}" for name, value in fields])


def _significant_items(node: ast.AST, name: str, items: list[Any]) -> list[Any]:
    if name == "body":
        items = [item for item in items if not (isinstance(item, ast.AnnAssign) and item.value is None)]
        if isinstance(node, DEFINITIONS) and items and is_docstring(items[0]):
            items = items[1:]
    elif isinstance(node, ast.JoinedStr):
        items = _merge_literals(items)
    return items


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
