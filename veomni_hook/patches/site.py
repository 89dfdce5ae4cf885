"""What an idiom finds: a site, routed to a kernel slot or not, the slot, and the text that routes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, Self

from veomni_hook.patches.reasons import Code, Reason

if TYPE_CHECKING:
    from veomni_hook.patches.code.edit import Edit

__all__ = [
    "Code",
    "Missed",
    "Reason",
    "Site",
    "SlotHandle",
    "SlotSpec",
    "Status",
    "formula_slot",
    "skipped_at_calls",
    "slot_name",
]


@dataclass(frozen=True)
class SlotSpec:
    """A kernel slot that the patched module gets as a global: ``name = Slot(op, variant, module)``.

    ``parameters`` are those of the upstream function whose calls the slot replaces, as source text. ``skips``
    lists definitions of the module that kernels compute without calling them. Each entry is a pair: the place
    that asks (a method, or a function whose calls ask) and the names.
    """

    name: str
    op: str
    variant: str
    parameters: str = ""
    skips: tuple[tuple[str, tuple[str, ...]], ...] = ()


class SlotHandle:
    """Stands for a slot in a config, so that guard functions written there resolve their names.

    The patched module has the real slot under the same name; this placeholder cannot be called.
    """

    def __init__(self, spec: SlotSpec) -> None:
        self.spec = spec

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"slot {self.spec.name!r} exists in patched modules only; it has no {name!r} here"
        )

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Not callable: guards run in the patched module, not where they are written."""
        raise TypeError(f"slot {self.spec.name!r} exists in patched modules only and cannot be called here")


def slot_name(op: str, variant: str) -> str:
    """The global of a patched module that holds the slot of ``op``/``variant``."""
    return f"veomni_{op}_{variant}"


def formula_slot(op: str, variant: str, parameters: str = "") -> SlotSpec:
    """The slot that routes of ``op``/``variant`` ask; ``parameters`` are those of `SlotSpec`."""
    return SlotSpec(slot_name(op, variant), op, variant, parameters)


class Status(StrEnum):
    """The status of a candidate."""

    #: A guard asks a slot here.
    ROUTED = "routed"
    #: The formula is known, but there is no module that a kernel could belong to.
    UNBOUND = "unbound"
    #: It looks like the op, but no idiom recognises its formula.
    MISSED = "missed"
    #: The code is known not to allow it; a call inserted here says so where it would be asked for.
    REFUSED = "refused"
    #: A guard could ask a slot here, but only kernels that are chosen by name would answer, and none is.
    UNCHOSEN = "unchosen"


class _Line(Protocol):
    """Code that is on a line of its module."""

    @property
    def lineno(self) -> int: ...


class Missed(Exception):
    """Code is not what an idiom knows, or cannot be followed.

    Args:
        reason: how it differs, or what it does; the exception's `Reason` becomes the site's.
        node: the code, whose line the reason then names.
        code: the cause, if ``reason`` does not have one.
    """

    def __init__(self, reason: str, node: object = None, code: Code = Code.NOT_FOLLOWED) -> None:
        super().__init__(reason)
        self.reason = Reason(reason, code, getattr(node, "lineno", 0))

    def __str__(self) -> str:
        return self.reason

    def at(self, node: object) -> Self:
        """This error, whose reason names the line of ``node`` if it names none."""
        if not self.reason.line:
            self.reason = Reason(self.reason, line=getattr(node, "lineno", 0))
        return self


@dataclass(frozen=True, slots=True)
class Site:
    """A candidate for one op in one module.

    Attributes:
        op: the op's name.
        target: the target that a patch would name (``Class.forward``, ``apply_rotary_pos_emb``).
        status: routed or not.
        variant: the formula; several, joined by ``|`` in the order of the branches, if a flag chooses.
        reason: why it is not routed, a `Reason`: the nearest idiom and the first difference; else a remark or
            empty.
        form: digest of what the code computes, the same in all releases that compute the same.
        captures: the source text for each operand of the formula.
        edits: the edits that route it.
        slots: the slots that the edits name.
        relies_on: definitions of the module that the route assumes unchanged, besides those named in the code
            that it covers (`veomni_hook.patches.routes.config` finds these).
        skips: definitions of the module that a kernel computes without calling them, by the place that asks:
            a method, or the function whose calls ask the slot. While the model runs, the slot compares the
            current definitions with the recognised ones.
        counted: whether it is one of the op's candidates (call sites belong to a candidate and are not).
        part: a named part of the op's candidates that has its own total in `list --by op`, or empty.
        lineno: the upstream line, from 1.
        imports: what the edits use of other modules: pairs of a module and the names imported from it.
    """

    op: str
    target: str
    status: Status
    variant: str = ""
    reason: str = ""
    form: str = ""
    captures: Mapping[str, str] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    slots: tuple[SlotSpec, ...] = ()
    relies_on: tuple[str, ...] = ()
    skips: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counted: bool = True
    part: str = ""
    lineno: int = 0
    imports: tuple[tuple[str, str], ...] = ()

    @classmethod
    def asking(
        cls,
        op: str,
        target: str,
        variants: str | Sequence[str],
        line: _Line,
        edits: Iterable[Edit],
        **more: Any,
    ) -> Site:
        """A routed site whose edits ask for kernels: of one variant, or several in the order of branches."""
        every = (variants,) if isinstance(variants, str) else tuple(variants)
        slots = tuple(formula_slot(op, variant) for variant in every)
        return cls(
            op,
            target,
            Status.ROUTED,
            "|".join(every),
            edits=tuple(edits),
            slots=slots,
            lineno=line.lineno,
            **more,
        )

    def left(self, why: str) -> Site:
        """This site, not edited because of what the user did not choose."""
        reason = Reason(why, Code.UNCHOSEN)
        return replace(self, status=Status.UNCHOSEN, reason=reason, edits=(), slots=(), imports=())

    @classmethod
    def calling(
        cls,
        op: str,
        target: str,
        variant: str,
        line: _Line,
        edits: Iterable[Edit],
        used: tuple[str, str],
        **more: Any,
    ) -> Site:
        """A routed site whose edits call a module of ours (``used``) and ask for no kernel."""
        return cls(
            op,
            target,
            Status.ROUTED,
            variant,
            edits=tuple(edits),
            imports=(used,),
            lineno=line.lineno,
            **more,
        )


def skipped_at_calls(site: Site) -> tuple[str, ...]:
    """What is skipped if a kernel replaces a call of the method or function of ``site``."""
    return (site.target, *site.skips.get(site.target, ()))
