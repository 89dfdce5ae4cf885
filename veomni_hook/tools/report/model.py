"""A page's data on modules."""

from __future__ import annotations

from dataclasses import dataclass

from veomni_hook.patches.report import MissedSite, YieldedPatch

__all__ = ["Answer", "Change", "Module", "Place"]


@dataclass(frozen=True)
class Answer:
    """What computes at a place.

    Attributes:
        backend: the kernel's backend; ``eager`` for the upstream code.
        why: the reason.
        who: in a live model, the class and number of the modules.
        calls: in a live model, the counted calls.
        others: every backend that was considered, with the reason for or against it.
        training: in a live model, the backend of the last call in training; empty if there was none.
    """

    backend: str
    why: str
    who: str = ""
    calls: str = ""
    others: tuple[tuple[str, str], ...] = ()
    training: str = ""


@dataclass(frozen=True)
class Place:
    """A line of the patched text that asks a kernel slot.

    Attributes:
        line: its number in the stored file.
        target: the method or function that contains it.
        slot: the slot's name in the module.
        op, variant: those of the slot.
        formula: the variant's formula; empty if the op is unknown here.
        answers: what computes there.
    """

    line: int
    target: str
    slot: str
    op: str
    variant: str
    formula: str
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Change:
    """One patch, and the places that ask kernels in its lines.

    Attributes:
        kind: the kind of patch, as in reports.
        target: the class, method or function.
        reason: its description.
        config: the config that declares it.
        lines: the first and last line in the stored file.
        declared: the pattern that matched the target; empty if the target was named.
        places: the places in these lines that ask for kernels.
        id: that of its row on the page.
    """

    kind: str
    target: str
    reason: str
    config: str
    lines: tuple[int, int]
    declared: str
    places: tuple[Place, ...]
    id: str = ""

    @property
    def span(self) -> str:
        """Its lines in words."""
        first, last = self.lines
        return f"line {first}" if first == last else f"lines {first}–{last}"  # noqa: RUF001 - a range

    @property
    def asked(self) -> list[tuple[Place, Answer]]:
        """Each place with each of its answers."""
        return [(place, answer) for place in self.places for answer in place.answers]

    @property
    def names(self) -> list[str]:
        """The ops and variants that it asks for, each once."""
        return [*dict.fromkeys(f"{place.op}/{place.variant}" for place in self.places)]

    @property
    def formulas(self) -> list[str]:
        """Their formulas, each once."""
        return [*dict.fromkeys(place.formula for place in self.places if place.formula)]

    @property
    def operands(self) -> str:
        """What a route binds the formula's operands to."""
        return self.reason.partition(": ")[2]


@dataclass(frozen=True)
class Module:
    """One modeling module.

    Attributes:
        name: its full name.
        label: its short name, which the command line accepts.
        version: its distribution with the version.
        patch_hash: identifies the patched form; empty if nothing applies.
        original: upstream's text; None if it is no longer known.
        patched: the patched text, without the header of the stored file; None if nothing applies.
        first: the number of its first line in the stored file.
        changes: the patches, by line.
        slots: the kernel slots that were added: name, op and variant, line.
        yielded: the patches that yielded to others.
        unrouted: the candidates that have no kernel slot, or one whose formula no machine has a kernel for;
            None: not searched.
        reason: why nothing applies, or why upstream's text is unknown, as a sentence.
        id: the prefix of the ids of its parts on the page.
    """

    name: str
    label: str
    version: str
    patch_hash: str
    original: str | None
    patched: str | None
    first: int
    changes: tuple[Change, ...]
    slots: tuple[tuple[str, str, int], ...]
    yielded: tuple[YieldedPatch, ...]
    unrouted: tuple[MissedSite, ...] | None
    reason: str = ""
    id: str = ""

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place that asks for a kernel."""
        return tuple(place for change in self.changes for place in change.places)
