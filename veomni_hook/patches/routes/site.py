"""What an idiom finds: a site, routed to a kernel slot or not, and the text that routes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from veomni_hook.patches.records import SlotSpec

__all__ = ["Site", "Splice", "Status", "skipped_at_calls", "slot_name"]


class Status(StrEnum):
    """What became of a candidate."""

    #: A guard asks a slot here.
    ROUTED = "routed"
    #: The formula is known, but there is no module that a kernel could belong to.
    UNBOUND = "unbound"
    #: It looks like the op, and no idiom computes the same.
    MISSED = "missed"


@dataclass(frozen=True, slots=True)
class Splice:
    """Text that takes the place of ``source[start:end]``; ``start == end`` inserts.

    ``marker`` says that the text is a comment only, which ``diff`` leaves out. With ``indents`` nothing is
    replaced: the text goes in front of every line of the range, and of what other splices put there, too.
    """

    start: int
    end: int
    text: str
    marker: bool = False
    indents: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """A candidate for one op in one module.

    Attributes:
        op: the op's name.
        target: what a patch would name as its target (``Class.forward``, ``apply_rotary_pos_emb``).
        status: routed or not.
        variant: the formula; several, joined by ``|`` in the order of the branches, where a flag chooses.
        reason: why it is not routed: the nearest idiom and the first difference; else a remark, or nothing.
        form: digest of what the code computes, the same in all releases that compute the same.
        captures: what stands for the formula's operands here, as source text.
        splices: the edits that route it.
        slots: the slots that the splices name.
        relies_on: definitions of the module that the route takes as they are, beside those that the code
            which it answers for names (`veomni_hook.patches.routes.reliance` finds these).
        skips: definitions of the module that a kernel computes without calling them, by the place that asks:
            a method, or the function at whose calls the slot stands. While the model runs, the slot compares
            what stands there with what was recognised.
        counted: whether it is one of the op's candidates (call sites belong to a candidate and are not).
        part: a named part of the op's candidates that has a total of its own in `coverage`, or nothing.
        lineno: the upstream line, from 1.
    """

    op: str
    target: str
    status: Status
    variant: str = ""
    reason: str = ""
    form: str = ""
    captures: Mapping[str, str] = field(default_factory=dict)
    splices: tuple[Splice, ...] = ()
    slots: tuple[SlotSpec, ...] = ()
    relies_on: tuple[str, ...] = ()
    skips: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counted: bool = True
    part: str = ""
    lineno: int = 0


def skipped_at_calls(site: Site) -> tuple[str, ...]:
    """What is skipped where a kernel stands in for a call of the method or function that ``site`` is."""
    return (site.target, *site.skips.get(site.target, ()))


def slot_name(op: str, variant: str) -> str:
    """The global of a patched module that holds the slot of ``op``/``variant``."""
    return f"veomni_{op}_{variant}"
