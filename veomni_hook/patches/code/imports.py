"""Imports in source text: make relative ones absolute, and find where to add others."""

from __future__ import annotations

import ast
import re

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.document import NEWLINE, Document
from veomni_hook.patches.code.edit import Edit, apply_edits
from veomni_hook.patches.code.tree import DEFINITIONS, blocks, walk_ast

__all__ = ["absolute_imports", "absolute_name", "import_anchor"]

_BLANK = r"(?:[ \t\f]|\\(?:\r\n|\r|\n))*"
_FROM = re.compile(
    rf"from(?P<gap>{_BLANK})(?P<module>(?:\.{_BLANK})*\.(?P<name>{_BLANK}[^\s.\\]+(?:{_BLANK}\.{_BLANK}[^\s.\\]+)*)?)"
)
_DOTS = re.compile(rf"from(?P<gap>{_BLANK})(?P<module>(?:\.{_BLANK})*\.)")


def absolute_imports(document: Document, module: str) -> str:
    """Return the text of a document with every relative import made absolute.

    No line is split or joined, so line numbers stay valid.

    Args:
        document: any part of a module.
        module: the name of the module that it belongs to, which is not a package.

    Raises:
        PatchError: an import reaches beyond the top-level package.
    """
    edits = []
    for node in walk_ast(document.tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        text = absolute_name("." * node.level + (node.module or ""), module, line=node.lineno)
        match = (_DOTS if node.module is None else _FROM).match(document.source, document.start(node))
        if match is None:
            raise ValueError(f"no relative import at line {node.lineno} of {module}")
        if not match["gap"]:
            text = f" {text}"
        joins = NEWLINE.findall(match["module"])
        # A name that spanned several joined lines becomes one; the number of lines must not change.
        text += "".join(f" \\{newline}" for newline in joins)
        if not joins and document.source[match.end() : match.end() + 1].isalpha():
            text += " "
        edits.append(Edit(match.start("module"), match.end("module"), text))
    return apply_edits(document.source, edits)


def absolute_name(name: str, module: str, *, line: int = 0) -> str:
    """Return the absolute form of a module's name that begins with dots, as seen from ``module``.

    Raises:
        PatchError: it reaches beyond the top-level package.
    """
    rest = name.lstrip(".")
    parts = module.split(".")[: len(rest) - len(name)] if len(name) > len(rest) else []
    if not parts and name != rest:
        raise PatchError(
            f"the import {f'at line {line} ' if line else f'of {name} '}reaches beyond the top-level package"
            f" of {module}",
            where=module,
            fix="import the module by its full name",
        )
    return ".".join([*parts, *([rest] if rest else [])])


def import_anchor(document: Document, *, future: bool = False) -> int:
    """Offset of the end of the line after which imports are added; -1 to add them before the first line.

    That is the last import before the first class or function (including one in an ``if`` or ``try``), or
    else the module's docstring; with ``future``, the docstring and ``__future__`` imports.
    """
    body = document.tree.body
    last: int | None = None
    for number, statement in enumerate(body):
        if isinstance(statement, DEFINITIONS):
            break
        is_docstring = number == 0 and ast.get_docstring(document.tree, clean=False) is not None
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        inside = (inner for block in blocks(statement) for inner in block)
        imports = any(isinstance(one, ast.Import | ast.ImportFrom) for one in (statement, *inside))
        if is_docstring or is_future or (imports and not future):
            last = number
    if last is None:
        return -1
    # Statements on the same line stay together.
    while last + 1 < len(body) and not document.begins_line(body[last + 1]):
        last += 1
    return document.line_end(document.end(body[last]))
