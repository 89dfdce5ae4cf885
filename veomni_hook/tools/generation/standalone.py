"""A patched module as a file that does without this package: no slots, no guards.

Where a guard returns a kernel's result and the formula is plain, the file calls the formula, a function at
its end. All other sites stay as they are upstream: `stays` leaves them out before the module is patched.
Models inside its models are of its own classes.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from veomni_hook.errors import ConfigError
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.selection.process_choice import unchosen
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, apply_edits, edited, marker_comment, reindent
from veomni_hook.patches.code.tree import binding, blocks, walk_ast
from veomni_hook.patches.code.wrap import wrapped
from veomni_hook.patches.site import Site, SlotSpec
from veomni_hook.tools.generation.formulas import is_plain, written
from veomni_hook.tools.generation.own_classes import made_here

__all__ = ["UPSTREAM", "stays", "without_guards"]

#: Why a site is as it is upstream.
UPSTREAM = "upstream's code, in a file that does without this package"
_OWN = "veomni_hook"


def stays(site: Site) -> str:
    """Return why a site stays as it is upstream, or "": for `patch_source`."""
    if site.slots and (why := unchosen(site.op, AUTO)):
        return why
    codes = [edit.text for edit in site.edits if not edit.marker and edit.inserts and edit.text.strip()]
    alone = len(codes) == 1 and not any(edit.fuses or edit.form for edit in site.edits)
    if not (alone and site.slots and "return " in codes[0]):
        return UPSTREAM
    asked = all(codes[0].count(slot.name) == codes[0].count(f"{slot.name}.kernel(") for slot in site.slots)
    return "" if asked and all(is_plain(slot.op, slot.variant) for slot in site.slots) else UPSTREAM


def without_guards(text: str, slots: Sequence[SlotSpec], module: str) -> str:
    """Return a patched text, with markers and without header, in which formulas are called.

    Args:
        text: the text, patched with `stays`, with absolute imports.
        slots: its slots.
        module: its name, for errors.

    Raises:
        ConfigError: a config's code uses this package.
    """
    text = text.replace("# [ROUTED] ", "# [FORMULA] ")
    document = Document(text, module)
    names = {slot.name for slot in slots}
    making, function = made_here(document)
    result = apply_edits(text, [*_called(document, names), *_declarations(document, names), *making])
    added = [function] if function else []
    if slots:
        note = "what veomni-hook has kernels for, as functions: a kernel of yours can take their place"
        functions = written([(slot.op, slot.variant) for slot in slots], document.tree)
        added.append(f"{marker_comment('FORMULAS', note)}\n\n{functions}")
    end = "".join(f"\n\n{one}\n" for one in added).replace("\n", document.newline)
    result = result.rstrip("\r\n") + document.newline + end
    _check(result, names, module)
    return result


@dataclass(frozen=True)
class _Guard:
    """``if (kernel := slot.kernel(...)) is not None:``: names, conditions in front of it, body."""

    slot: str
    kernel: str
    conditions: Sequence[ast.expr]
    bound: Mapping[str, ast.expr]  # what the question binds by ``:=``
    body: Sequence[ast.stmt]


def _called(document: Document, slots: Collection[str]) -> Iterator[Edit]:
    """The edits that put the call of a formula in the place of each guard, and of what would never run."""
    for block in blocks(document.tree, nested=True):
        for number, statement in enumerate(block):
            guard = _guard(statement, slots)
            if guard is None:
                continue
            first, bound = statement, guard.bound
            name, value = binding(block[number - 1]) if number else ("", None)
            if isinstance(value, ast.Tuple) and name in _unpacked(guard.body):
                first, bound = block[number - 1], {**bound, name: value}
            indent = document.indent(first)
            code = reindent(_spelled(document, guard, bound), document.indent(guard.body[0]), indent)
            if guard.conditions:
                test = " and ".join(document.text(one) for one in guard.conditions)
                code = f"{indent}if {test}:\n{reindent(code, '', '    ')}"
            ends = not guard.conditions and isinstance(guard.body[-1], ast.Return)
            last = block[-1] if ends else statement
            start, end = (
                document.line_start(document.start(first)),
                document.line_end(document.full_end(last)),
            )
            yield Edit(start, end, wrapped(code).replace("\n", document.newline))


def _guard(statement: ast.stmt, slots: Collection[str]) -> _Guard | None:
    if not isinstance(statement, ast.If):
        return None
    tests = statement.test.values if isinstance(statement.test, ast.BoolOp) else [statement.test]
    match tests[-1]:
        case ast.Compare(
            left=ast.NamedExpr(
                target=ast.Name(id=kernel),
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=slot), attr="kernel")) as call,
            )
        ) if slot in slots:
            inside = [node for node in walk_ast(call) if isinstance(node, ast.NamedExpr)]
            return _Guard(
                slot, kernel, tests[:-1], {node.target.id: node.value for node in inside}, statement.body
            )
    return None


def _unpacked(body: Sequence[ast.stmt]) -> set[str]:
    stars = (node for one in body for node in walk_ast(one) if isinstance(node, ast.Starred))
    return {star.value.id for star in stars if isinstance(star.value, ast.Name)}


def _spelled(document: Document, guard: _Guard, bound: Mapping[str, ast.expr]) -> str:
    """The lines of a guard's body with the formula for the kernel, and the operands for a name of them."""
    edits: list[Edit] = []
    for node in (node for statement in guard.body for node in walk_ast(statement)):
        name = node.value if isinstance(node, ast.Starred) else node
        if not isinstance(name, ast.Name):
            continue
        value = bound.get(name.id)
        if name.id == guard.kernel:
            edits.append(Edit(document.start(node), document.end(node), guard.slot))
        elif isinstance(value, ast.Tuple) and isinstance(node, ast.Starred):
            operands = ", ".join(document.text(one) for one in value.elts)
            edits.append(Edit(document.start(node), document.end(node), operands))
        elif value is not None and not isinstance(value, ast.Tuple):
            edits.append(Edit(document.start(node), document.end(node), document.text(value)))
    start = document.line_start(document.start(guard.body[0]))
    return edited(document.source, start, document.full_end(guard.body[-1]), edits)


def _declarations(document: Document, slots: Collection[str]) -> Iterator[Edit]:
    """The edits that remove the slots, their import, and the comment above them."""
    source = document.source
    for statement in document.tree.body:
        imports = isinstance(statement, ast.ImportFrom) and statement.module == f"{_OWN}.kernels.slot"
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if imports or any(isinstance(target, ast.Name) and target.id in slots for target in targets):
            start = document.line_start(document.comments_above(document.start(statement)))
            while start and not source[document.line_start(start - 1) : start].strip():
                start = document.line_start(start - 1)
            yield Edit(start, document.next_line(document.end(statement)), "")


def _check(text: str, slots: Collection[str], module: str) -> None:
    """Raise ConfigError if the text still needs this package."""
    for node in walk_ast(ast.parse(text)):
        imported = (isinstance(node, ast.ImportFrom) and node.module) or ""
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else [imported]
        asked = (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in slots
        )
        if asked or any(name.partition(".")[0] == _OWN for name in names):
            raise ConfigError(
                f"the patched {module} uses this package: {ast.unparse(node)}",
                where=f"line {getattr(node, 'lineno', 0)} of the file",
                fix="leave out the config that brings this code, or the option --standalone",
            )
