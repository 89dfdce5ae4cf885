"""What idioms find in a module, as rows and totals; a failure is a row too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms import recognise as recogniser
from veomni_hook.patches.report import MissedSite
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Reason, Site, Status, slot_name

__all__ = [
    "ERROR",
    "NO_KERNEL",
    "ROUTED",
    "Row",
    "Total",
    "denominators",
    "examine",
    "failure",
    "missed",
    "totals",
]

#: The status of a row for a module, or for an idiom in a module, that failed.
ERROR = "error"
#: The status of a candidate with a kernel slot whose formula has no kernel on any machine.
#: `veomni_hook.tools.cli.sites.table`, which knows kernels, sets it; idioms report such sites as routed.
NO_KERNEL = "no_kernel"
ROUTED = Status.ROUTED.value


@dataclass(frozen=True, order=True, slots=True)
class Row:
    """One candidate of one module.

    Attributes:
        module: the module's name.
        target: the target that a patch would name; `-` for an error.
        op: the op's name; `-` if the module itself failed.
        variant: the formula; empty if unknown.
        status: `routed`, `no_kernel`, `unbound`, `missed`, `refused` or `error`.
        reason: why it is not routed; otherwise a remark or empty.
        lineno: the upstream line.
        counted: whether it is one of the op's candidates; a call site of a candidate is not.
        part: a subset of the op's candidates that has its own total; otherwise empty.
        edited: whether the module's text changes there.
        code: the cause of the reason (`veomni_hook.patches.reasons`), if an idiom left it; otherwise empty.
        line: the line that the reason names; 0 if there is none.
    """

    module: str
    target: str
    op: str
    variant: str
    status: str
    reason: str
    lineno: int = 0
    counted: bool = True
    part: str = ""
    edited: bool = False
    code: str = ""
    line: int = 0

    @property
    def slots(self) -> list[str]:
        """The slots that a routed place asks, one for each formula."""
        return [slot_name(self.op, one) for one in self.variant.split("|") if one]

    def to_dict(self) -> dict[str, str | int]:
        """Return the fields that listings show."""
        hidden = ("lineno", "counted", "part", "edited")
        return {name: getattr(self, name) for name in self.__slots__ if name not in hidden}


@dataclass(frozen=True, slots=True)
class Total:
    """One op, or a part of it, over all modules.

    Attributes:
        op: the op's name, with `/part` for a part of its candidates that has its own total.
        candidates: number of candidates.
        routed: candidates with a kernel slot, not counting `no_kernel`.
        unbound: candidates with a known formula but no module that a kernel could belong to.
        missed: candidates that no idiom recognises.
        call_sites: calls of candidates that were found.
        unbound_call_sites: call sites without a module that a kernel could belong to.
        no_kernel: candidates with a kernel slot whose formula has no kernel on any machine.
        refused: candidates that are known not to allow it, with the reason.
    """

    op: str
    candidates: int
    routed: int
    unbound: int
    missed: int
    call_sites: int = 0
    unbound_call_sites: int = 0
    no_kernel: int = 0
    refused: int = 0

    @property
    def share(self) -> float:
        """Percentage of candidates that are routed; 100 if there are no candidates."""
        return 100.0 * self.routed / self.candidates if self.candidates else 100.0

    def to_dict(self) -> dict[str, object]:
        """Return the fields and the share as JSON-ready values."""
        fields: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "share": round(self.share, 2)}


def examine(module: str, text: str, *, optional: Collection[str] = ()) -> list[Row]:
    """Return every site of a module, sorted; a failure becomes a row with status `error`.

    Args:
        module: the module's name.
        text: its source.
        optional: the idioms to ask of those that apply only with a setting (`recognise.OPTIONAL`).
    """
    try:
        document = Document(text, module)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        return [failure(module, f"the module cannot be parsed: {error}")]
    try:
        sites = recogniser.recognise(document, optional=optional)
        return sorted(_row(module, site) for site in sites)
    except Exception as error:
        rows = sorted(_one_by_one(document, optional=optional))
        # If one of the idioms raised again, it has a row; otherwise joining them failed.
        return rows if any(row.status == ERROR for row in rows) else [failure(module, str(error)), *rows]


def missed(module: str, text: str) -> tuple[MissedSite, ...]:
    """Return the sites of a module that are not routed, and its errors, as a patch report lists them."""
    rows = examine(module, text)
    return tuple(
        MissedSite(row.op, row.target, row.status, row.reason, row.code, row.line)
        for row in rows
        if row.status != ROUTED
    )


def failure(module: str, reason: str, op: str = "-") -> Row:
    """Return the row of an error."""
    return Row(module, "-", op, "", ERROR, reason)


def totals(rows: Iterable[Row]) -> list[Total]:
    """Return a total for each op, in the order of the idioms, then for parts of ops; zeros included."""
    by_op: dict[str, list[Row]] = {idiom.OP: [] for idiom in recogniser.every_idiom()}
    for row in rows:
        if row.status != ERROR:
            by_op.setdefault(row.op, []).append(row)
            if row.part:
                by_op.setdefault(f"{row.op}/{row.part}", []).append(row)
    return [_total(op, of_op) for op, of_op in by_op.items()]


def denominators() -> dict[str, list[str]]:
    """Return for each op what counts as a candidate: one sentence from each of its idioms."""
    sentences: dict[str, list[str]] = {}
    for idiom in recogniser.every_idiom():
        sentences.setdefault(idiom.OP, []).append(idiom.CANDIDATES)
    return sentences


def _one_by_one(document: Document, *, optional: Collection[str]) -> Iterator[Row]:
    view = ModuleView(document)
    for idiom in recogniser.asked(optional, document.source):
        try:
            sites = view.sites(idiom.find)
        except Exception as error:
            yield failure(document.module, _told(idiom, error), idiom.OP)
            continue
        yield from (_row(document.module, site) for site in sites)


def _told(idiom: ModuleType, error: Exception) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f" ({frame.tb_frame.f_code.co_name}, line {frame.tb_lineno})" if frame is not None else ""
    name = idiom.__name__.removeprefix("veomni_hook.patches.idioms.")
    return f"the idiom {name} raised {type(error).__name__}: {error}{place}"


def _row(module: str, site: Site) -> Row:
    reason = Reason(site.reason)
    left = site.status is not Status.ROUTED
    return Row(
        module,
        site.target,
        site.op,
        site.variant,
        site.status.value,
        str(reason),
        lineno=site.lineno,
        counted=site.counted,
        part=site.part,
        edited=bool(site.edits),
        code=str(reason.code) if left else "",
        line=reason.line if left else 0,
    )


def _total(op: str, rows: Sequence[Row]) -> Total:
    counted = [row.status for row in rows if row.counted]
    calls = [row.status for row in rows if not row.counted]
    return Total(
        op,
        candidates=len(counted),
        routed=counted.count(ROUTED),
        unbound=counted.count(Status.UNBOUND.value),
        missed=counted.count(Status.MISSED.value),
        refused=counted.count(Status.REFUSED.value),
        call_sites=len(calls),
        unbound_call_sites=calls.count(Status.UNBOUND.value),
        no_kernel=counted.count(NO_KERNEL),
    )
