"""Edits of source text, and the comments that mark them: the only way in which this package changes code.

An edit is a range of character offsets and a replacement text, so everything outside the ranges stays
unchanged, byte for byte. This module does not depend on Python syntax.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["FUSED", "PLAIN", "Edit", "Placed", "apply_edits", "marker_comment", "one_line", "place_edits"]

PLAIN, FUSED = "plain", "fused"

_DECORATOR = re.compile(r"@(?=\w)")


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace ``source[start:end]`` by ``text``; ``start == end`` inserts, an empty text deletes.

    Attributes:
        start: offset of the first character.
        end: offset after the last character.
        text: the replacement.
        patch: index of the applied patch that the edit belongs to; -1 if none.
        marker: the edit only adds comments, which the text for ``diff`` omits.
        fuses: nothing is replaced: the text is put before every line of the range, including lines that other
            edits insert, in a copy of the method that runs if this condition holds. Only routes write such
            edits; `routes.compose` turns them into others.
        form: the form of the method that the edit is for: `PLAIN` (upstream's), `FUSED` (the copy), or both.
    """

    start: int
    end: int
    text: str
    patch: int = -1
    marker: bool = False
    fuses: str = ""
    form: str = ""

    @property
    def inserts(self) -> bool:
        """Whether the edit only inserts."""
        return self.start == self.end


@dataclass(frozen=True, slots=True)
class Placed:
    """An edit and the range ``[start, end)`` of its text in the result."""

    edit: Edit
    start: int
    end: int


def place_edits(source: str, edits: Iterable[Edit], *, markers: bool = True) -> tuple[str, list[Placed]]:
    """Apply ``edits`` and return the text and the position of each edit in it, in text order.

    Insertions at one offset keep their given order and come before a replacement that starts there. With
    ``markers=False``, marker edits are skipped.

    Raises:
        ValueError: a range is outside the source, or two edits overlap.
    """
    chosen = sorted(
        (edit for edit in edits if markers or not edit.marker),
        key=lambda edit: (edit.start, not edit.inserts),
    )
    pieces: list[str] = []
    placed: list[Placed] = []
    position = length = 0
    for edit in chosen:
        if not 0 <= edit.start <= edit.end <= len(source):
            raise ValueError(
                f"edit [{edit.start}, {edit.end}) lies outside {len(source)} characters of source"
            )
        if edit.start < position:
            raise ValueError(f"edit [{edit.start}, {edit.end}) overlaps one that ends at {position}")
        pieces.append(source[position : edit.start])
        pieces.append(edit.text)
        length += edit.start - position
        placed.append(Placed(edit, length, length + len(edit.text)))
        length += len(edit.text)
        position = edit.end
    pieces.append(source[position:])
    return "".join(pieces), placed


def apply_edits(source: str, edits: Iterable[Edit], *, markers: bool = True) -> str:
    """Return ``source`` with ``edits`` applied; see `place_edits` for order, ``markers`` and errors."""
    return place_edits(source, edits, markers=markers)[0]


def marker_comment(label: str, text: str) -> str:
    """The comment ``# [LABEL] text`` that marks an edit in the patched text, without a newline."""
    return "# " + one_line(f"[{label}] {text}")


def one_line(text: str) -> str:
    """Return ``text`` as one comment line.

    Collapses white space and removes the ``@`` of decorators: transformers searches a module's source for the
    text ``@use_experts_implementation``, and a comment must not match.
    """
    return _DECORATOR.sub("", " ".join("".join(c if c.isprintable() else " " for c in text).split()))
