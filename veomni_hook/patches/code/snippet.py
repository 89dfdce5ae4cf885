"""Read the source text of the functions and classes in configs, and rename identifiers in it.

It reads the whole file and finds the definition in its syntax tree, so that comments above a definition,
multi-line decorators and strings stay as written. It raises `ReplacementError` if the source is unreadable.

A name map renames identifiers that are equal to one of its keys, or that begin with one at a word boundary.
An identifier that already begins with the replacement stays, so applying a map twice has no further effect.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from veomni_hook.errors import NameMapError, ReplacementError
from veomni_hook.patches.code.document import Definition, Document, FunctionNode, has_docstring, statements_of
from veomni_hook.patches.code.edit import Edit, apply_edits, reindent
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.scope import global_uses, parameters
from veomni_hook.patches.code.tree import DEFINITIONS, decorator_name

__all__ = ["Snippet", "apply_name_map", "function_body", "read_snippet"]

VERBS = frozenset(
    {
        "add_helper",
        "add_helper_after",
        "add_method",
        "insert_guard",
        "modify_init",
        "override_method",
        "replace_class",
        "replace_function",
    }
)


@dataclass(frozen=True)
class Snippet:
    """The text of one definition, without indentation and without the decorators of configs.

    ``comments`` is the block of ``#`` lines directly above it, without the last newline; ``document``
    contains only the definition and its decorators.
    """

    comments: str
    document: Document

    @property
    def node(self) -> FunctionNode | ast.ClassDef:
        """The definition."""
        node = self.document.tree.body[0]
        if not isinstance(node, DEFINITIONS):
            raise TypeError(f"a snippet holds one definition, not {type(node).__name__}")
        return node

    def with_text(self, text: str) -> Snippet:
        """The snippet with another text of its definition; itself if the text is the same."""
        if text == self.document.source:
            return self
        return replace(self, document=Document(text, self.document.module))

    def named(self, name: str, *, without: frozenset[str] = frozenset(), references: bool = False) -> str:
        """The text, with the definition renamed to ``name``.

        Args:
            without: dumps (`ast.dump`) of decorators to omit.
            references: also rename references to the definition inside it.
        """
        document, node = self.document, self.node
        edits = [
            Edit(*decorator_lines(document, d), "") for d in node.decorator_list if ast.dump(d) in without
        ]
        if node.name != name:
            keyword = "class" if isinstance(node, ast.ClassDef) else "def"
            after = document.source.index(keyword, document.start(node)) + len(keyword)
            start = document.source.index(node.name, after)
            edits.append(Edit(start, start + len(node.name), name))
            uses = global_uses(document.tree, [node.name]) if references else ()
            edits += (
                Edit(document.start(use.node), document.end(use.node), name)
                for use in uses
                if isinstance(use.node, ast.Name)
            )
        return apply_edits(document.source, edits)


def read_snippet(
    replacement: object,
    *,
    where: str,
    target: str = "",
    name_map: Mapping[str, str] | None = None,
    accessor: str = "",
    tolerate: Callable[[NameMapError], None] | None = None,
) -> Snippet:
    """Read the source of a function or class.

    Args:
        replacement: the object; wrapped functions, static and class methods and properties are unwrapped.
        where: what declares the patch, for error messages.
        target: the patch's target, for error messages.
        name_map: renames identifiers, see `apply_name_map`.
        tolerate: handles an entry of ``name_map`` that matches nothing, see `apply_name_map`.
        accessor: ``"setter"`` or ``"deleter"`` to read that accessor of a property instead of its getter.

    Raises:
        ReplacementError: the source cannot be found, or it is not a definition.
        NameMapError: an entry of ``name_map`` matches nothing and ``tolerate`` is None.
    """
    unwrapped = _unwrapped(replacement, accessor)
    document, definition = _locate(unwrapped, replacement, where=where, target=target)
    node = definition.node
    begin, end = document.span(node)[0], document.full_end(node)
    indent = document.indent(node)
    above = document.source[document.comments_above(begin) : document.line_start(begin)].rstrip("\r\n")
    comments = reindent(above, indent, "")
    text = reindent(document.source[document.line_start(begin) : end], indent, "")
    # A name map applies to identifiers of the replacement, not of the config that declares it.
    alone = Document(text)
    decorators: list[ast.expr] = getattr(alone.tree.body[0], "decorator_list", [])
    verbs = [decorator for decorator in decorators if decorator_name(decorator) in VERBS]
    text = apply_edits(text, [Edit(*decorator_lines(alone, verb), "") for verb in verbs])
    mapped = apply_name_map(f"{comments}\n{text}", name_map, where=where, target=target, tolerate=tolerate)
    lines = mapped.split("\n")
    count = comments.count("\n") + 1
    comments, text = "\n".join(lines[:count]), "\n".join(lines[count:])
    return Snippet(comments, Document(text, document.module))


def function_body(replacement: object, *, where: str = "", target: str = "") -> tuple[tuple[str, ...], str]:
    """Return the parameter names of a function and its body as text, dedented, without its docstring.

    Comments in the body stay. The text has no final newline; it is empty if there is only a docstring.

    Raises:
        ReplacementError: the source cannot be read, or it is not a function.
    """
    snippet = read_snippet(replacement, where=where, target=target)
    document, node = snippet.document, snippet.node
    if isinstance(node, ast.ClassDef):
        raise ReplacementError(
            f"the replacement {node.name} is a class, but must be a function",
            where=where or document.module,
            fix="decorate a function",
            target=target,
        )
    return tuple(parameter.arg for parameter in parameters(node)), body_text(document, node)


def body_text(document: Document, node: FunctionNode) -> str:
    """The body of ``node`` as text without indentation, docstring and last newline."""
    body = statements_of(node)
    if not body:
        return ""
    end = document.full_end(node)
    if document.is_inline(node):
        return document.source[document.start(body[0]) : end]
    if has_docstring(node):
        begin = document.next_line(document.end(node.body[0]))
    else:
        begin = document.line_start(document.span(body[0])[0])
        # And the comments above.
        while begin and document.source[(line := document.line_start(begin - 1)) : begin].strip()[:1] in (
            "",
            "#",
        ):
            begin = line
    return reindent(document.source[begin:end], document.indent(body[0]), "").strip("\n")


def decorator_lines(document: Document, decorator: ast.expr) -> tuple[int, int]:
    """The range of a decorator's lines, including the ``@`` and the last newline."""
    start = document.start(decorator)
    at = document.source.rfind("@", 0, start)
    return document.line_start(at), document.next_line(document.end(decorator))


def _unwrapped(replacement: Any, accessor: str) -> Any:
    if isinstance(replacement, property):
        replacement = {"setter": replacement.fset, "deleter": replacement.fdel}.get(
            accessor, replacement.fget
        )
    if isinstance(replacement, functools.cached_property):
        replacement = replacement.func
    while isinstance(replacement, staticmethod | classmethod):
        replacement = replacement.__func__
    return replacement if inspect.isclass(replacement) else inspect.unwrap(replacement)


def _locate(
    unwrapped: object, replacement: object, *, where: str, target: str
) -> tuple[Document, Definition]:
    name = getattr(replacement, "__qualname__", None) or repr(replacement)

    def unreadable(reason: str, fix: str) -> ReplacementError:
        return ReplacementError(
            f"the source of the replacement {name} cannot be read: {reason}",
            where=where,
            fix=fix,
            target=target,
        )

    if not inspect.isclass(unwrapped) and not isinstance(unwrapped, types.FunctionType):
        raise unreadable(
            f"it is a {type(unwrapped).__name__}, neither a Python function nor a class",
            "write it with def or class, or use create_patch_from_external to import it",
        )
    path, text = _file_of(unwrapped)
    if not text:
        raise unreadable(
            f"no source file at {path}" if path else "it comes from no file",
            "define it in a file (not in an interactive session or by exec)",
        )
    try:
        document = _parsed(text, path)
    except SyntaxError as error:
        raise unreadable(f"{path} does not parse: {error}", "restart after saving a valid file") from error
    definitions = list(_candidates(document, unwrapped))
    if not definitions:
        reason = (
            "it is a lambda" if name.endswith("<lambda>") else f"{path} does not define it where Python says"
        )
        raise unreadable(reason, "use def or class in a file, and restart after changing it")
    return document, definitions[-1]


def _file_of(unwrapped: object) -> tuple[str, str]:
    """The path of the file that defines a function or class, and its text; empty where it is unknown."""
    if isinstance(unwrapped, types.FunctionType):
        path, namespace = unwrapped.__code__.co_filename, unwrapped.__globals__
    else:
        module = sys.modules.get(unwrapped.__module__, types.ModuleType(""))
        path, namespace = str(getattr(module, "__file__", None) or ""), vars(module)
        if not path:
            # The module was executed without an entry in sys.modules: methods of its classes know the file.
            codes = (v.__code__ for v in vars(unwrapped).values() if isinstance(v, types.FunctionType))
            path = next((code.co_filename for code in codes), "")
    linecache.checkcache(path)
    return path, "".join(linecache.getlines(path, namespace)) if path else ""


@functools.lru_cache(maxsize=16)
def _parsed(text: str, path: str) -> Document:
    return Document(text, path)


def _candidates(document: Document, unwrapped: Any) -> Iterator[Definition]:
    for definition in document.definitions():
        if isinstance(unwrapped, types.FunctionType):
            code, node = unwrapped.__code__, definition.node
            line = document.lineno(document.span(node)[0])
            if getattr(node, "name", "") == code.co_name and line == code.co_firstlineno:
                yield definition
        elif definition.kind == "class" and definition.qualname == unwrapped.__qualname__:
            line = document.lineno(document.span(definition.node)[0])
            if line == getattr(unwrapped, "__firstlineno__", line):
                yield definition


_WORD = r"\w+"


def apply_name_map(
    text: str,
    name_map: Mapping[str, str] | None,
    *,
    where: str,
    target: str = "",
    tolerate: Callable[[NameMapError], None] | None = None,
) -> str:
    """Rename identifiers of ``text`` in code, strings and comments; longer keys come first.

    Args:
        text: the text.
        name_map: old names and new names.
        where: the location for error messages.
        target: the patch's target, for error messages.
        tolerate: called with the error instead of raising it; if it returns, the other keys apply.

    Raises:
        NameMapError: a key matches nothing in ``text``.
    """
    if not name_map:
        return text
    keys = sorted(name_map, key=len, reverse=True)
    whole = [
        rf"{_edge(key[0])}{re.escape(key)}{_edge(key[-1], after=True)}"
        for key in keys
        if not key.isidentifier()
    ]
    # Escape sequences come first; otherwise the n of "\nName" would be part of the name.
    pattern = re.compile("|".join([r"\\.", *whole, _WORD]), re.DOTALL)
    used: set[str] = set()
    mapped = pattern.sub(partial(_rename, keys=keys, name_map=name_map, used=used), text)
    unused = [key for key in name_map if key not in used]
    if unused:
        known = re.findall(_WORD, text)
        close = "; ".join(f"{key!r}: nearest {listed(nearest(key, known))}" for key in unused)
        error = NameMapError(
            f"name_map matches nothing in the replacement's source for {listed(map(repr, unused))}",
            where=where,
            fix=f"drop the entry or name an identifier (or the beginning of one) that occurs ({close})",
            target=target,
        )
        if tolerate is None:
            raise error
        tolerate(error)
    return mapped


def _rename(match: re.Match[str], *, keys: list[str], name_map: Mapping[str, str], used: set[str]) -> str:
    name = match.group()
    if name in name_map:
        used.add(name)
        return name_map[name]
    if not name.isidentifier():
        return name
    bare = name.lstrip("_")
    for key in keys:
        if not _begins(bare, key):
            continue
        used.add(key)
        new = name_map[key]
        if new.startswith(key) and (bare == new or _begins(bare, new)):
            return name
        return name[: len(name) - len(bare)] + new + bare[len(key) :]
    return name


def _begins(name: str, prefix: str) -> bool:
    """Whether ``name`` begins with ``prefix`` and has a word boundary after it."""
    if len(name) <= len(prefix) or not prefix or not name.startswith(prefix):
        return name == prefix
    last, following = prefix[-1], name[len(prefix)]
    return not (last.isdigit() and following.isdigit()) and not (last.isalnum() and following.islower())


def _edge(character: str, *, after: bool = False) -> str:
    if not (character.isalnum() or character == "_"):
        return ""
    return r"(?!\w)" if after else r"(?<!\w)"
