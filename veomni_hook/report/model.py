"""What a page tells of modules, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from veomni_hook.patches.report import MissedSite, YieldedPatch

__all__ = ["Answer", "Change", "Module", "Place", "Unrouted"]


@dataclass(frozen=True)
class Answer:
    """What computes at a place.

    Attributes:
        backend: the kernel's backend; ``eager`` for the upstream code.
        why: the reason.
        who: in a live model, the class of the modules and their number.
        calls: in a live model, the calls that were counted.
        others: every backend that was considered, with the reason for or against it.
    """

    backend: str
    why: str
    who: str = ""
    calls: str = ""
    others: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Place:
    """A line of the patched text that asks a kernel slot.

    Attributes:
        line: its number in the stored file.
        target: the method or function that it lies in.
        slot: the slot's name in the module.
        op, variant: what the slot is for.
        formula: the variant in a line; empty where the op is not known here.
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
        kind: what kind of patch, as reports name it.
        target: the class, method or function.
        reason: its description.
        config: who declares it.
        lines: the first and last line in the stored file.
        declared: the pattern that the target was found by; empty where it was named.
        places: what asks a kernel there.
    """

    kind: str
    target: str
    reason: str
    config: str
    lines: tuple[int, int]
    declared: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Unrouted:
    """A candidate that has no kernel slot, or a slot whose formula no machine has a kernel for."""

    op: str
    target: str
    status: str
    reason: str

    @classmethod
    def of(cls, site: MissedSite) -> Unrouted:
        """Return what a patch report says of a candidate."""
        return cls(site.op, site.target, site.status, site.reason)


@dataclass(frozen=True)
class Module:
    """One modeling module.

    Attributes:
        name: its full name.
        label: its short name, as the command line takes it.
        version: the distribution that it is from, with the version.
        patch_hash: names the patched form; empty where nothing applies.
        original: upstream's text; None where it is not known any more.
        patched: the patched text, without the header of the stored file; None where nothing applies.
        first: the number of its first line in the stored file.
        changes: the patches, by line.
        slots: the kernel slots that were added, each with op and variant.
        yielded: the patches that gave way.
        unrouted: the candidates that no kernel computes; None: nobody looked for them.
        reason: a sentence: why nothing applies, or why upstream's text is not known.
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
    unrouted: tuple[Unrouted, ...] | None
    reason: str = ""

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place that asks a kernel."""
        return tuple(place for change in self.changes for place in change.places)
