"""Combine the edits of all routes of a module into compatible ones.

Each idiom writes as if it were alone. This module separates upstream's methods from their copies, indents
edits that are inside the ``else`` of another route's guard there, and wraps lines that become too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from veomni_hook.patches.code.document import Definition, Document
from veomni_hook.patches.code.edit import FUSED, PLAIN, Edit, apply_edits
from veomni_hook.patches.code.placement import logical_line
from veomni_hook.patches.code.reindent import string_lines
from veomni_hook.patches.code.wrap import WIDTH, wrapped
from veomni_hook.patches.routes.fused import asked_first, method_at

__all__ = ["composed"]


def composed(
    document: Document, routed: Sequence[Edit], marks: Iterable[Edit] = (), others: Sequence[Edit] = ()
) -> tuple[list[Edit], dict[int, set[int]]]:
    """The edits that carry out routes, and the steps that are carried out by edits of others.

    Args:
        document: the module.
        routed: the edits of routes, in order of application. If several are at the beginning of an edit that
            ``fuses``, those before it stay outside of it.
        marks: comments directly above statements, wherever these move.
        others: edits that do not belong to routes; lines that they touch are not wrapped.

    Returns:
        Edits for `veomni_hook.patches.routes.fused.with_copies`.

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
    plain, shared = _fitted(document, [*asked, *written], others)
    fused, also = _fitted(document, _moved(document, routed, marks), others)
    for index, holders in also.items():
        shared.setdefault(index, set()).update(holders)
    copied = {id(edit) for edit in (*plain, *fused) for method in methods if _is_in(document, method, edit)}
    edits = [replace(edit, form=PLAIN) if id(edit) in copied else edit for edit in plain]
    for method in methods:
        edits_of = [edit for edit in fused if id(edit) in copied and _is_in(document, method, edit)]
        edits += (replace(edit, form=FUSED) for edit in edits_of)
        # All of them are in the insertion of the copy, which has the first one's number.
        steps = {edit.patch for edit in edits_of}
        for index in steps:
            shared.setdefault(index, set()).add(min(steps))
    return edits, shared


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
    inside = _inside_strings(text)
    while start < edit.end:
        following = document.next_line(start)
        number = document.lineno(start) - document.lineno(edit.start)
        if document.source[start:following].strip() and number not in inside:
            yield start + _indentation(document.source[start:following])
        start = following


def _indented(document: Document, edit: Edit, indent: str) -> Edit:
    """An edit with its lines indented; another edit indents a line that this one only ends."""
    lines = edit.text.split("\n")
    first = 0 if edit.start == document.line_start(edit.start) else 1
    if first == len(lines):
        return edit  # inside a line, maybe a part of an expression
    inside = _inside_strings(edit.text)
    for number in range(first, len(lines)):
        if lines[number].strip() and number not in inside:
            at = _indentation(lines[number])
            lines[number] = lines[number][:at] + indent + lines[number][at:]
    return replace(edit, text="\n".join(lines))


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" \t\f"))


def _inside_strings(text: str) -> set[int]:
    """The numbers, from 0, of the lines of ``text`` that begin inside a string."""
    return {number - 2 for number in string_lines(f"if 1:\n{text}")}


def _fitted(
    document: Document, edits: Sequence[Edit], others: Sequence[Edit]
) -> tuple[list[Edit], dict[int, set[int]]]:
    """Edits with the lines that they write wrapped; other upstream lines do not change."""
    fitted: list[Edit] = []
    shared: dict[int, set[int]] = {}
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
            for part in parts:
                shared.setdefault(part.patch, set()).add(line.patch)
        fitted.append(line)
    return fitted, shared


def _wrapped(
    document: Document, edit: Edit, edits: Sequence[Edit], others: Sequence[Edit]
) -> tuple[Edit, list[Edit]]:
    """One edit for a line that an edit makes too long, with the edits that it replaces; else the edit."""
    start, end = document.line_start(edit.start), document.line_end(edit.end)
    if end - start + sum(len(each.text) for each in edits if start <= each.start <= end) <= WIDTH:
        return edit, []
    start, end = logical_line(document, edit.start)
    # What is inserted at the very end, such as a bracket that closes, belongs to the line too.
    parts = [e for e in edits if start <= e.start < end + e.inserts and not (e.inserts and e.start == start)]
    alone = not any(each.start <= end and start <= each.end for each in others)
    if not alone or any(part.marker for part in parts):
        return edit, []
    within = (replace(part, start=part.start - start, end=part.end - start) for part in parts)
    text = apply_edits(document.source[start:end], within)
    made = wrapped(text)
    return (Edit(start, end, made, edit.patch), parts) if made != text else (edit, [])
