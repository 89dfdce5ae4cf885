"""What `explain` returns: rows, and their output as text, in a terminal, or in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from shutil import get_terminal_size
from typing import overload

from veomni_hook.kernels.slot.candidates import REPLACED
from veomni_hook.kernels.slot.record import Calls
from veomni_hook.layout import counted, paragraphs

__all__ = ["MODES", "UNASKED", "Explanation", "Row"]

#: The backend of a row whose guard is never asked, although the model is called.
UNASKED = "unasked"

MODES = ("training", "evaluation")


@dataclass(frozen=True)
class Row:
    """One slot at one place: ``backend`` ran there last, or would run if it is not ``called`` yet.

    Attributes:
        place: the module's name in the model; empty for the model itself, or a modeling module.
        kind: its class.
        slot: the slot's name in the modeling module.
        op, variant: the slot's op and variant.
        backend: ``eager``: the upstream code; ``none``: a backend chosen by name cannot run there, and a
            call raises an error; ``replaced``: another function replaces the code, and the slot is not
            asked; ``unasked``: the model is called in a way that bypasses the slot.
        reason: why this backend.
        choice: what was chosen, followed in brackets by the source unless it was the settings.
        called: whether the slot, or a fused op that contains it, was asked or compiled by torch.compile.
        settled: no kernel can be selected, so calls cannot change this row.
        training: the calls in training by backend, that of the last call last (see
            `veomni_hook.kernels.slot.record`). Not counted: calls while no kernel could be selected, and
            calls of compiled code.
        evaluation: all other calls.
        note: further information about the place.
        supplied: whether any machine has a kernel for the variant.
        compiled: ``itself`` if the row shows what torch.compile compiled for this place, ``kind`` if it shows
            what was compiled for another place that runs the same code; else empty.
        module: the modeling module whose source asks the slot there.
        asked_in: the methods that ask it, as ``Class.method``; empty if any method may.
    """

    place: str
    kind: str
    slot: str
    op: str
    variant: str
    backend: str
    reason: str
    choice: str
    called: bool
    settled: bool = False
    training: tuple[Calls, ...] = ()
    evaluation: tuple[Calls, ...] = ()
    note: str = ""
    supplied: bool = True
    compiled: str = ""
    module: str = ""
    asked_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Rows with the same content, printed as one."""

    kind: str
    places: int
    op: str
    backend: str
    why: str
    calls: str

    def __str__(self) -> str:
        told = self.why if self.backend in (REPLACED, UNASKED) else f"{self.backend} ({self.why})"
        return f"{self.kind} x{self.places}: {self.op}: {told}{self.calls and f', {self.calls}'}"


@dataclass(frozen=True, repr=False)
class Explanation:
    """The rows of a model or module; equal rows are printed once, with a count.

    ``modules`` are the modeling modules that define its classes.
    """

    subject: str
    rows: tuple[Row, ...]
    modules: tuple[str, ...] = ()

    def groups(self) -> list[Group]:
        """Return the rows as they are printed: places with the same content are one group."""
        held: dict[tuple[object, ...], list[Row]] = {}
        for row in self.rows:
            modes = [(*((each.backend, each.reason) for each in getattr(row, mode)), mode) for mode in MODES]
            key = (row.kind, row.op, row.variant, row.backend, _why(row), *modes)
            held.setdefault(key, []).append(row)
        return [_group(rows) for rows in held.values()]

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.subject}: no kernel slots; its modeling code is not patched"
        return "\n".join([f"{self.subject}:", *(f"  {group}" for group in self.groups()), *self._apart()])

    def __repr__(self) -> str:
        """Return the printed text, wrapped at words to the width of the terminal."""
        width = max(get_terminal_size((80, 24)).columns, 20)
        return paragraphs(str(self), width, indent=4)

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        heads = ("class", "places", "op", "backend", "why", "calls")
        body = [(one.kind, one.places, one.op, one.backend, one.why, one.calls) for one in self.groups()]
        told = self._apart() if self.rows else [str(self)]
        return "".join(
            [
                f"<table><caption>{escape(self.subject)}</caption>",
                f"<thead><tr>{_cells('th', heads)}</tr></thead><tbody>",
                *(f"<tr>{_cells('td', row)}</tr>" for row in body),
                "</tbody></table>",
                *(f"<p>{escape(line.strip())}</p>" for line in told),
            ]
        )

    @overload
    def to_html(self, path: None = None) -> str: ...

    @overload
    def to_html(self, path: str | PathLike[str]) -> None: ...

    def to_html(self, path: str | PathLike[str] | None = None) -> str | None:
        """Return a page about the model as one HTML document, or write it to a file.

        The page shows, for each place, what ran, why, and the counted calls; what was not routed; and the
        upstream source next to the patched source. It is the page of `veomni-hook report`. It needs no
        network and contains no script.

        Args:
            path: the file to write or overwrite; by default nothing is written.

        Returns:
            The document if ``path`` is None; else None, so that a notebook does not print it.

        Raises:
            OSError: the file cannot be written.
        """
        from pathlib import Path

        from veomni_hook.report.live import live_page

        document = live_page(self, notes=[line.strip() for line in self._apart()])
        if path is None:
            return document
        Path(path).write_text(document, encoding="utf-8")
        return None

    def _apart(self) -> list[str]:
        """Count the places for which no machine has a kernel."""
        count = sum(not row.supplied for row in self.rows)
        return [f"  {count} of {counted(len(self.rows), 'place')}: no machine has a kernel"] if count else []


def _why(row: Row) -> str:
    state = row.reason if row.called or row.settled else f"{row.reason}; not called yet"
    bound = f", {row.choice}" if "(" in row.choice else ""
    return f"{state}{bound}{row.note and f'; {row.note}'}"


def _group(rows: Sequence[Row]) -> Group:
    first = rows[0]
    kind, op = first.kind, f"{first.op}/{first.variant}"
    return Group(kind, len(rows), op, first.backend, _why(first), _calls(rows))


def _calls(rows: Sequence[Row]) -> str:
    """Return the calls of all rows together, by backend where the row alone does not show it."""
    first = rows[0]
    told = []
    for mode in MODES:
        sums = [sum(getattr(row, mode)[at].times for row in rows) for at in range(len(getattr(first, mode)))]
        found = [one._replace(times=times) for one, times in zip(getattr(first, mode), sums, strict=True)]
        if [(one.backend, one.reason) for one in found] == [(first.backend, first.reason)]:
            told.append(f"{counted(found[0].times, 'call')} in {mode}")
        elif found:
            each = ", ".join(f"{one.backend} ({one.reason}) {counted(one.times, 'call')}" for one in found)
            told.append(f"in {mode}: {each}")
    return "; ".join(told)


def _cells(tag: str, values: Sequence[object]) -> str:
    return "".join(f"<{tag}>{escape(str(value))}</{tag}>" for value in values)
