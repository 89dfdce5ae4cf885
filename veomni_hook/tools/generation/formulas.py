"""The formulas of kernels as functions of a file without this package: their references, as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from veomni_hook.kernels.selection.registry import registry
from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.edit import Edit, edited
from veomni_hook.patches.code.scope import global_bindings, global_uses, own_names
from veomni_hook.patches.code.wrap import wrapped
from veomni_hook.patches.site import slot_name
from veomni_hook.patterns import pattern_file, pattern_source

__all__ = ["is_plain", "written"]

_OWN = "veomni_hook"
_QUOTED = re.compile(r"(?<!`)`(?P<name>\w+)`(?!`)")


@dataclass(frozen=True)
class _Reference:
    """The reference of an op: its text, and the statement that binds each of its names."""

    op: str
    document: Document
    homes: dict[str, ast.stmt]

    def needs(self, name: str) -> dict[str, ast.stmt]:
        """The names that the definition of a name needs, itself included, with their statements."""
        needed: dict[str, ast.stmt] = {}
        pending = [name]
        while pending:
            name = pending.pop()
            if name not in needed:
                needed[name] = self.homes[name]
                alone = ast.Module([self.homes[name]], [])
                pending += (use.name for use in global_uses(alone, self.homes))
        return needed


def is_plain(op: str, variant: str) -> bool:
    """Whether a formula holds for every call, and its reference is a function that needs only torch."""
    row = registry.variant(op, variant)
    if row is None or row.refuses is not None or row.operands:
        return False
    if row.reference != f"{_OWN}.kernels.{op}.reference:{variant}":
        return False
    needed = _reference(op).needs(variant).values()
    return not any(module.startswith(_OWN) for one in needed for module in _imported(one).values())


def written(formulas: Iterable[tuple[str, str]], module: ast.Module) -> str:
    """Return the functions of plain formulas, each with the name of its slot, and what they need.

    Args:
        formulas: pairs of an op and a variant.
        module: the file that they are for; what it imports already is not imported again.
    """
    variants: dict[str, list[str]] = {}
    for op, variant in formulas:
        variants.setdefault(op, []).append(variant)
    there = {name: text for one in module.body for name, text in _imported(one).items()}
    imports: dict[str, str] = {}
    functions: list[str] = []
    for op, names in variants.items():
        reference = _reference(op)
        needed = {name: one for variant in names for name, one in reference.needs(variant).items()}
        called = {name: slot_name(op, name.lstrip("_")) for name, one in needed.items() if not _imported(one)}
        for name, text in ((name, _imported(one)[name]) for name, one in needed.items() if _imported(one)):
            fits = there.get(name) == text or name not in global_bindings(module)
            called[name] = name if fits else f"veomni_{name}"
            if there.get(name) != text:
                imports[called[name]] = text
        functions += _definitions(reference, needed, called)
    lines = []
    for name, text in sorted(imports.items()):
        module_name, _, attribute = text.partition(":")
        renamed = "" if name == (attribute or module_name) else f" as {name}"
        start = f"from {module_name} import {attribute}" if attribute else f"import {module_name}"
        lines.append(f"{start}{renamed}")
    return "\n\n\n".join([*(["\n".join(lines)] if lines else []), *functions])


def _definitions(reference: _Reference, needed: dict[str, ast.stmt], called: dict[str, str]) -> Iterator[str]:
    """The text of each definition, in the order of the reference, with the names of the file."""
    document = reference.document
    for statement in document.tree.body:
        name = next((name for name, one in needed.items() if one is statement), None)
        if name is None or _imported(statement):
            continue
        nodes = [use.node for use in global_uses(ast.Module([statement], []), called)]
        edits = [
            Edit(document.start(n), document.end(n), called[n.id]) for n in nodes if isinstance(n, ast.Name)
        ]
        start, end = document.span(statement)
        at = start
        if isinstance(statement, FunctionNode):
            at = document.source.index(name, document.start(statement) + len("def"))
        edits.append(Edit(at, at + len(name), called[name]))
        text = edited(document.source, start, end, edits)
        yield wrapped(_QUOTED.sub(lambda match: f"`{called.get(match['name'], match['name'])}`", text))


@cache
def _reference(op: str) -> _Reference:
    document = Document(pattern_source(pattern_file(op)), pattern_file(op))
    return _Reference(op, document, {name: one for one in document.tree.body for name in own_names([one])})


def _imported(statement: ast.stmt) -> dict[str, str]:
    """The names that an import binds, each with what it is: a module, or ``module:name``."""
    if isinstance(statement, ast.Import):
        return {one.asname or one.name: one.name for one in statement.names}
    if isinstance(statement, ast.ImportFrom):
        return {one.asname or one.name: f"{statement.module}:{one.name}" for one in statement.names}
    return {}
