"""What `explain` returns: rows, and how they are printed: as lines, within a terminal, in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from shutil import get_terminal_size
from typing import overload

from veomni_hook.kernels.answers import REPLACED
from veomni_hook.kernels.record import Calls
from veomni_hook.layout import counted, paragraphs

__all__ = ["MODES", "UNASKED", "Explanation", "Row"]

#: The backend of a row whose guard nobody asks, though the model is called.
UNASKED = "unasked"

MODES = ("training", "evaluation")


@dataclass(frozen=True)
class Row:
    """One slot of one place: ``backend`` ran there last, or would if it is not ``called`` yet.

    Attributes:
        place: the module's name in the model; empty: the model itself, or a modeling module.
        kind: its class.
        slot: the slot's name in the modeling module.
        op, variant: what the slot is for.
        backend: ``eager`` is the upstream code; ``none``: a backend was chosen by name that cannot run there,
            and a call is an error; ``replaced``: another's function stands there, and the slot is not asked;
            ``unasked``: the model is called in a way that does not ask it.
        reason: why.
        choice: what was wanted, and in brackets who said so unless the settings did.
        called: whether it, or a fused op that it is a part of, has been asked, or compiled by torch.compile.
        settled: no call can change what is said: no kernel comes into question.
        training: the calls in training by backend, that of the last call last (`veomni_hook.kernels.record`
            says what training is). Calls while no kernel came into question are not counted, nor are those of
            compiled code.
        evaluation: all other calls.
        note: what else is to be known of the place.
        supplied: whether any machine has a kernel for the variant.
        compiled: ``itself`` where what is said is what torch.compile made of this place, ``kind`` where it is
            what it made of another one that runs the same code; else empty.
        module: the modeling module whose source asks the slot there.
        asked_in: the methods that ask it, as ``Class.method``; empty: any that does.
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
    """Rows of which the same is told, as they are printed."""

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
    """The rows of a model or module; printed, equal ones are counted.

    ``modules`` are the modeling modules that its classes are from.
    """

    subject: str
    rows: tuple[Row, ...]
    modules: tuple[str, ...] = ()

    def groups(self) -> list[Group]:
        """Return the rows as they are printed: one for all places of which the same is told."""
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
        """Return what is printed, broken between words to the width of the terminal."""
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

        The page shows what ran at each place, why, and the calls that were counted; what was not routed; and
        upstream's source beside the patched one. It is the page of `veomni-hook report`, needs no network and
        has no script.

        Args:
            path: the file to write, replaced if it is there; by default nothing is written.

        Returns:
            The document where there is no path; else None, so that a notebook does not print it.

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
        """Count the places that no machine has a kernel for."""
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
    """The calls of all rows together; what each backend got, where that is more than the row says."""
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
