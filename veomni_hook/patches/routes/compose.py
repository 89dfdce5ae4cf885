"""Combine the edits of all routes of a module into compatible ones, with the copies of methods.

Each idiom writes as if it were alone. This module separates upstream's methods from their copies, indents
edits that are inside the ``else`` of another route's guard there, and wraps lines that become too long.

A copy: upstream's method stays as it is, line by line: tools search its source for lines, and replace
them. Where a kernel may take over several statements, the method begins with a question. If the answer is
yes, a function of the module goes on: the same method with the guards. It is no method, so that it also
serves a method that another class borrows, and classes that `adopt` changes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from veomni_hook.patches.code.document import Definition, Document, FunctionNode, has_docstring
from veomni_hook.patches.code.edit import (
    FUSED,
    PLAIN,
    Edit,
    at_start,
    edited,
    logical_line,
    marker_comment,
    reindent,
    string_lines,
)
from veomni_hook.patches.code.scope import loaded, names_in, own_names
from veomni_hook.patches.code.tree import decorator_name, walk_ast
from veomni_hook.patches.code.wrap import WIDTH, wrapped

__all__ = ["asked_first", "composed", "copy_name", "method_at", "with_copies"]


def copy_name(qualname: str) -> str:
    """The name of the copy of a method, a function of its module."""
    return f"veomni_{qualname.replace('.', '_')}"


def method_at(document: Document, offset: int) -> Definition | None:
    """The method of a class that contains an offset, if a function beside the class can do the same."""
    functions = [
        one
        for one in document.definitions()
        if isinstance(one.node, FunctionNode) and document.start(one.node) <= offset < document.end(one.node)
    ]
    if [one.kind for one in functions] != ["method"]:
        return None
    (method,) = functions
    node, owner = _function(method), method.parents[-1]
    names = names_in(node)
    attributes = {one.attr for one in walk_ast(node) if isinstance(one, ast.Attribute)}
    of_class = own_names(owner.body) if isinstance(owner, ast.ClassDef) else set()
    header = loaded([node.args, *([node.returns] if node.returns else [])])
    means_the_same = (
        len(method.parents) == len(("module", "class"))
        and len(document.find(method.qualname)) == 1
        and not names & {"super", "__class__"}
        and not any(name.startswith("__") and not name.endswith("__") for name in names | attributes)
        and not of_class.intersection(header)
        and not {decorator_name(one) for one in node.decorator_list} & {"staticmethod", "classmethod"}
    )
    return method if means_the_same else None


def asked_first(document: Document, method: Definition, routed: Iterable[Edit]) -> Iterator[Edit]:
    """The edits that let a method go on in its copy, with the comments of the guards there.

    Args:
        document: the module.
        method: the method.
        routed: the edits of routes in the method.
    """
    routed, node = list(routed), _function(method)
    place = at_start(document, node)
    questions: dict[str, dict[int, None]] = {}
    for edit in routed:
        if edit.fuses:
            questions.setdefault(edit.fuses, {})[edit.patch] = None
    spec = node.args
    handed_on = [one.arg for one in (*spec.posonlyargs, *spec.args)]
    handed_on += [f"*{spec.vararg.arg}"] if spec.vararg else []
    handed_on += [f"{one.arg}={one.arg}" for one in spec.kwonlyargs]
    handed_on += [f"**{spec.kwarg.arg}"] if spec.kwarg else []
    call = f"{copy_name(method.qualname)}({', '.join(handed_on)})"
    for question, patches in questions.items():
        marks = {e.text.strip(): e.patch for e in routed if e.marker and e.form and e.patch in patches}
        for text, patch in marks.items():
            comment = f"{place.indent}{text}\n"
            yield Edit(place.start, place.start, comment, patch, marker=True, form=PLAIN)
        code = f"{place.indent}if {question}:\n{place.indent}    return {call}\n"
        yield Edit(place.start, place.start, wrapped(code), next(iter(patches)), form=PLAIN)


def with_copies(document: Document, edits: Iterable[Edit], *, markers: bool = True) -> list[Edit]:
    """The edits of upstream's methods, and the insertions of the copies.

    Args:
        document: the module.
        edits: all edits of the module.
        markers: whether copies contain the edits that are markers.
    """
    edits, methods = list(edits), list[Definition]()
    for start in sorted({edit.start for edit in edits if edit.form == FUSED}):
        is_known = methods and start < document.end(methods[-1].node)
        if not is_known and (method := method_at(document, start)) is not None:
            methods.append(method)
    kept = [edit for edit in edits if edit.form != FUSED]
    fused = [edit for edit in edits if edit.form != PLAIN and (markers or not edit.marker)]
    return [*kept, *(_copy(document, method, fused, markers=markers) for method in methods)]


def _copy(document: Document, method: Definition, edits: Sequence[Edit], *, markers: bool) -> Edit:
    node = _function(method)
    start, end = document.start(node), document.next_line(document.full_end(node))
    inside = [
        edit
        for edit in edits
        if start < edit.start < end or (edit.start == end and edit.form == FUSED and edit.inserts)
    ]
    name = document.source.index(node.name, start + len("def"))
    own = [Edit(name, name + len(node.name), copy_name(method.qualname))]
    if has_docstring(node):
        first = node.body[0]
        own.append(
            Edit(document.line_start(document.start(first)), document.next_line(document.end(first)), "")
        )
    indent = document.indent(node)
    text = reindent(f"{indent}{edited(document.source, start, end, (*own, *inside))}", indent, "")
    # The name of the copy is longer than that of the method.
    header, rest = text.split("\n", 1)
    text = f"{wrapped(header)}\n{rest}"
    if markers:
        what = f"{method.qualname}, where kernels replace several statements"
        text = f"{marker_comment('FUSED', what)}\n{text}"
    at = document.next_line(document.full_end(method.parents[-1]))
    patches = frozenset[int]().union(*(edit.patches for edit in inside if edit.form == FUSED))
    return Edit(at, at, f"\n\n{text}", min(patches), patches)


def _function(method: Definition) -> FunctionNode:
    if not isinstance(method.node, FunctionNode):
        raise TypeError(f"{method.qualname} is no function")
    return method.node


def composed(
    document: Document, routed: Sequence[Edit], marks: Iterable[Edit] = (), others: Sequence[Edit] = ()
) -> list[Edit]:
    """The edits that carry out routes.

    Args:
        document: the module.
        routed: the edits of routes, in order of application. If several are at the beginning of an edit that
            ``fuses``, those before it stay outside of it.
        marks: comments directly above statements, wherever these move.
        others: edits that do not belong to routes; lines that they touch are not wrapped.

    Returns:
        Edits for `veomni_hook.patches.routes.compose.with_copies`.

    Raises:
        ValueError: the ranges of two edits that ``fuse`` cross, or one is not in a method.
    """
    marks = list(marks)
    written = [edit for edit in (*routed, *marks) if not edit.fuses and edit.form != FUSED]
    methods = _fusing(document, routed)
    if not methods:
        return _fitted(document, written, others)
    _check_nested(document, [edit for edit in routed if edit.fuses])
    asked = [
        edit
        for method in methods
        for edit in asked_first(document, method, [e for e in routed if _is_in(document, method, e)])
    ]
    plain = _fitted(document, [*asked, *written], others)
    fused = _fitted(document, _moved(document, routed, marks), others)
    copied = {id(edit) for edit in (*plain, *fused) for method in methods if _is_in(document, method, edit)}
    edits = [replace(edit, form=PLAIN) if id(edit) in copied else edit for edit in plain]
    return [*edits, *(replace(edit, form=FUSED) for edit in fused if id(edit) in copied)]


def _fusing(document: Document, routed: Sequence[Edit]) -> list[Definition]:
    methods: dict[str, Definition] = {}
    for edit in routed:
        if edit.fuses:
            method = method_at(document, edit.start)
            if method is None:
                raise ValueError(f"line {document.lineno(edit.start)} is not in a method")
            methods.setdefault(method.qualname, method)
    return list(methods.values())


def _is_in(document: Document, method: Definition, edit: Edit) -> bool:
    """Whether an edit is in a method, or adds to the end of its body."""
    end = document.next_line(document.full_end(method.node))
    deeper = len(document.indent(method.node)) < _indentation(edit.text)
    return document.start(method.node) < edit.start < end or (edit.start == end and edit.inserts and deeper)


def _moved(document: Document, routed: Sequence[Edit], marks: Sequence[Edit]) -> list[Edit]:
    """The edits of the copies, in which some lines are moved."""
    before = [number for number, edit in enumerate(routed) if not edit.fuses]
    edits = [*(routed[number] for number in before), *marks]
    moved: list[Edit] = []
    for number, moving in enumerate(routed):
        if moving.fuses:
            for place, edit in enumerate(edits):
                first = moving.start + (place < len(before) and before[place] < number)
                if first <= edit.start < moving.end:
                    edits[place] = _indented(document, edit, moving.text)
            moved += (Edit(at, at, moving.text, moving.patch) for at in _lines(document, moving))
    return [*edits, *moved]


def _check_nested(document: Document, ranges: Sequence[Edit]) -> None:
    for number, inner in enumerate(ranges):
        for outer in ranges[:number]:
            apart = inner.end <= outer.start or outer.end <= inner.start
            within = outer.start <= inner.start and inner.end <= outer.end
            if not (apart or within or (inner.start < outer.start and outer.end <= inner.end)):
                raise ValueError(f"two guards cross at line {document.lineno(inner.start)}")


def _lines(document: Document, edit: Edit) -> Iterator[int]:
    """Where the code begins in each line of a range, except blank lines and lines inside a string.

    Additional indentation goes after the existing one: four columns before a tab may have no effect.
    """
    start = document.line_start(edit.start)
    text = document.source[start : edit.end]
    inside = string_lines(text)
    while start < edit.end:
        following = document.next_line(start)
        number = document.lineno(start) - document.lineno(edit.start) + 1
        if document.source[start:following].strip() and number not in inside:
            yield start + _indentation(document.source[start:following])
        start = following


def _indented(document: Document, edit: Edit, indent: str) -> Edit:
    """An edit with its lines indented; another edit indents a line that this one only ends."""
    lines = edit.text.split("\n")
    first = 0 if edit.start == document.line_start(edit.start) else 1
    if first == len(lines):
        return edit  # inside a line, maybe a part of an expression
    inside = string_lines(edit.text)
    for number in range(first, len(lines)):
        if lines[number].strip() and number + 1 not in inside:
            at = _indentation(lines[number])
            lines[number] = lines[number][:at] + indent + lines[number][at:]
    return replace(edit, text="\n".join(lines))


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" \t\f"))


def _fitted(document: Document, edits: Sequence[Edit], others: Sequence[Edit]) -> list[Edit]:
    """Edits with the lines that they write wrapped; other upstream lines do not change."""
    fitted: list[Edit] = []
    done: tuple[int, list[Edit]] = (-1, [])
    for edit in sorted(edits, key=lambda edit: (edit.start, not edit.inserts)):
        if edit.start < done[0] or edit in done[1]:
            continue  # it is in the wrapped line
        if edit.inserts and not edit.text.strip():
            fitted.append(edit)  # it only indents an upstream line
            continue
        if edit.inserts and edit.start == document.line_start(edit.start):
            fitted.append(replace(edit, text=wrapped(edit.text)))
            continue
        line, parts = _wrapped(document, edit, edits, others)
        if parts:
            fitted = [one for one in fitted if one not in parts]
            done = line.end, parts
        fitted.append(line)
    return fitted


def _wrapped(
    document: Document, edit: Edit, edits: Sequence[Edit], others: Sequence[Edit]
) -> tuple[Edit, list[Edit]]:
    """One edit for a line that an edit makes too long, with the edits that it replaces; else the edit."""
    start, end = document.line_start(edit.start), document.line_end(edit.end)
    if end - start + sum(len(edit.text) for edit in edits if start <= edit.start <= end) <= WIDTH:
        return edit, []
    start, end = logical_line(document, edit.start)
    # What is inserted at the very end, such as a bracket that closes, belongs to the line too.
    parts = [e for e in edits if start <= e.start < end + e.inserts and not (e.inserts and e.start == start)]
    alone = not any(other.start <= end and start <= other.end for other in others)
    if not alone or any(part.marker for part in parts):
        return edit, []
    text = edited(document.source, start, end, parts)
    folded = wrapped(text)
    patches = frozenset[int]().union(*(part.patches for part in parts))
    return (Edit(start, end, folded, edit.patch, patches), parts) if folded != text else (edit, [])
