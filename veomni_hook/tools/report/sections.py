"""The sections on one module: its patches and kernels, what was not routed, and the diff."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from veomni_hook.kernels.explain.rows import NO_KERNEL, NOT_CALLED
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.slot.candidates import REPLACED
from veomni_hook.layout import counted
from veomni_hook.patches.reasons import remedies
from veomni_hook.patches.report import MissedSite
from veomni_hook.tools.report.diff import Sides, line_id, side_by_side, tally
from veomni_hook.tools.report.html import Html, code, join, link, tag, text
from veomni_hook.tools.report.lines import Kind
from veomni_hook.tools.report.model import Answer, Change, Module, Place
from veomni_hook.tools.report.page import Entry, badge, facts, section, table, value

__all__ = ["Ids", "entry", "figures", "module_section"]

#: Display names of kinds of patches.
_KINDS = {
    "class_replacement": "class replaced",
    "method_override": "method replaced",
    "function_replacement": "function replaced",
    "additional_import": "import added",
    "init_modification": "__init__ changed",
    "method_addition": "method added",
    "guard": "guard",
    "rewrite": "rewrite",
    "class_mapping": "class mapped",
    "route": "kernel slot asked",
    "helper": "helper added",
    "post_import_block": "code after the imports",
    "drop_import": "import dropped",
    "exclude": "left out",
}
_STATUS = {
    "missed": "not recognised",
    "unbound": "no module to attach a kernel to",
    "no kernel": "no kernel exists",
    "unchosen": "no kernel is chosen",
}
_ROUTE = "route"
_NONE = (NO_KERNEL, REPLACED, NOT_CALLED)
#: The heading of the column with kernels, before and after a model ran.
_PLANNED, _RAN = "Kernel", "What ran"


class Ids:
    """The ids of one module's parts, unique on the page."""

    def __init__(self, label: str, taken: set[str]) -> None:
        base = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "module"
        number = 1
        while (name := base if number == 1 else f"{base}-{number}") in taken:
            number += 1
        taken.add(name)
        # With this prefix, no label can equal an id of the frame.
        self.module = f"module-{name}"
        self.places = f"{self.module}-places"
        self.unrouted = f"{self.module}-unrouted"
        self.source = f"{self.module}-source"

    def row(self, at: int) -> str:
        """Return the id of a change's row in the table."""
        return f"{self.module}-patch-{at + 1}"


def entry(module: Module, ids: Ids) -> Entry:
    """Return a module's lines in the contents."""
    parts = []
    if module.patched is not None:
        parts.append(Entry(ids.places, "Patches and kernels"))
    if module.unrouted is not None:
        parts.append(Entry(ids.unrouted, "Not routed"))
    if module.patched is not None:
        parts.append(Entry(ids.source, "Source"))
    return Entry(ids.module, module.label, tuple(parts))


def figures(modules: Sequence[Module], measured: Iterable[tuple[str, Html]], *, live: bool) -> Html:
    """Return the figures of the page: what is fused and what is not, what was ``measured``, and patches."""
    places = [place for module in modules for place in module.places]
    fused = [place for place in places if any(map(_is_fused, place.answers))]
    left = [place.op for place in places if place not in fused]
    left += [one.op for module in modules for one in module.unrouted or () if one.status != "no kernel"]
    kinds = Counter[Kind]()
    for module in modules:
        if module.patched is not None and module.original is not None:
            kinds.update(tally(module.original, module.patched))
    added, removed = kinds[Kind.ADDED] + kinds[Kind.CHANGED], kinds[Kind.REMOVED] + kinds[Kind.CHANGED]
    patches = sum(len(module.changes) for module in modules)
    return facts(
        [
            ("Ran fused" if live else "Fused", _listed([place.op for place in fused])),
            ("Upstream's code", _listed(left)),
            *measured,
            ("Patches", value(patches, f"+{added:,} −{removed:,} lines")),  # noqa: RUF001 - the minus sign
        ]
    )


def _is_fused(answer: Answer) -> bool:
    return (answer.training or answer.backend) not in (EAGER, *_NONE)


def _listed(ops: Sequence[str]) -> Html:
    """The number of places, and their ops."""
    return value(counted(len(ops), "place"), ", ".join(dict.fromkeys(ops)))


def module_section(module: Module, ids: Ids, *, live: bool) -> Html:
    """Return everything about one module.

    Args:
        module: the module.
        ids: the ids of its parts.
        live: whether the answers are what ran, with calls.
    """
    about = [code(module.name), f" from {module.version}"]
    if module.patch_hash:
        about += ["; the patched form is ", code(module.patch_hash)]
    lead = tag("p", *about, ".", class_="quiet")
    if module.patched is None:
        told = tag("p", module.reason)
        return section(ids.module, module.label, lead, told, _unrouted(module, ids))
    parts = [lead, _places(module, ids, live=live), _unrouted(module, ids), _source(module, ids)]
    return section(ids.module, module.label, *parts)


def _places(module: Module, ids: Ids, *, live: bool) -> Html:
    kernel = _RAN if live else _PLANNED
    heads = ["Place", "Patch", kernel, "Why this kernel", *(["Calls"] if live else [])]
    rows = [row for at in range(len(module.changes)) for row in _rows(module, ids, at, live=live)]
    caption = f"Every patch of {module.label}; the first column leads to its lines."
    parts: list[Html] = [table(caption, heads, rows, kind="places")]
    if module.yielded:
        gone = [
            (one.target, _KINDS.get(one.kind, one.kind), one.reason, one.config) for one in module.yielded
        ]
        caption = "Patches that gave way to another one."
        parts.append(table(caption, ("Target", "Kind", "To what", "Declared by"), gone))
    return section(ids.places, "Patches and kernels", *parts, level=3)


def _rows(module: Module, ids: Ids, at: int, *, live: bool) -> Iterator[list[object]]:
    """A row for each answer of a change's places; one row without a kernel if it asks for none."""
    change = module.changes[at]
    first, last = change.lines
    span = f"line {first}" if first == last else f"lines {first}–{last}"  # noqa: RUF001 - a range
    name = join([f"{change.target}, ", tag("span", span, class_="whole")])
    asked = [(place, answer) for place in change.places for answer in place.answers]
    for number, (place, answer) in enumerate(asked or [(None, None)]):
        row = ids.row(at) if number == 0 else None
        linked = module.original is not None
        shown = link(line_id(ids.module, first), name, id=row) if linked else tag("span", name, id=row)
        told: list[object] = ["", "", ""]
        if answer is not None:
            told = [_backend(answer), _why(answer), answer.calls]
        yield [shown, _patch(change, place), *told[: 3 if live else 2]]


def _patch(change: Change, place: Place | None) -> Html:
    """A description of the patch: its formula, or its kind and description."""
    if change.kind == _ROUTE and place is not None:
        formula = tag("p", place.formula, class_="quiet small") if place.formula else None
        return join([code(f"{place.op}/{place.variant}"), formula])
    return join(
        [badge(_KINDS.get(change.kind, change.kind)), " ", change.reason or "no description was given"]
    )


def _backend(answer: Answer) -> Html:
    named = f"{answer.backend} (upstream's code)" if answer.backend == EAGER else answer.backend
    kind = "" if answer.backend == EAGER else "none" if answer.backend in _NONE else "own"
    who = tag("span", f" {answer.who}", class_="quiet small") if answer.who else None
    return join([badge(named, kind), who])


def _why(answer: Answer) -> Html:
    if not answer.others:
        return text(answer.why)
    listed = tag("ul", *(tag("li", code(name), f": {why}") for name, why in answer.others))
    count = len(answer.others)
    summary = tag("summary", f"{count} backend{'' if count == 1 else 's'} considered")
    return join([answer.why, tag("details", summary, listed, class_="small")])


def _unrouted(module: Module, ids: Ids) -> Html | None:
    if module.unrouted is None:
        return None
    if not module.unrouted:
        said = "Every place of this module that looks like one of the ops asks a kernel slot."
        body = tag(
            "p", said if module.patched is not None else "No place of this module looks like one of the ops."
        )
    else:
        rows = [_missed(one) for one in module.unrouted]
        caption = "Places that look like one of the ops and run upstream's code without asking a kernel."
        heads = ("Target", "Op", "Why not", "Nearest formula and first difference", "Cause")
        told = [(code(cause), remedy) for cause, remedy in remedies(one.code for one in module.unrouted)]
        what = table("What can be done about a cause, by the author of the code.", ("Cause", "Remedy"), told)
        body = join([table(caption, heads, rows), what if told else None])
    return section(ids.unrouted, "Not routed", body, level=3)


def _missed(one: MissedSite) -> tuple[object, ...]:
    cause = code(one.code) if one.code else ""
    return one.target, code(one.op), _STATUS.get(one.status, one.status), one.reason, cause


def _source(module: Module, ids: Ids) -> Html:
    if module.patched is None:
        raise ValueError(f"{module.name} has no patched form")
    if module.original is None:
        said = (
            f"Upstream's source is not known any more, so there is nothing to compare with: {module.reason}"
        )
        return section(ids.source, "Source", tag("p", said), level=3)
    notes = _notes(module, ids)
    names = (f"upstream, {module.version}", "patched")
    sides = Sides(ids.module, module.original, module.patched, names, module.first, notes)
    numbers = (
        "Numbers on the right are those of tracebacks and breakpoints. A line with an arrow is upstream's"
        " own, further to the right because a guard stands around it."
    )
    return section(ids.source, "Source", tag("p", numbers), _legend(), side_by_side(sides), level=3)


def _legend() -> Html:
    said = (
        ("added", "+", "added by a patch"),
        ("removed", "−", "upstream's line is gone"),  # noqa: RUF001 - the minus sign
        ("moved", "→", "only further indented"),
    )
    return tag(
        "ul", *(tag("li", tag("b", sign), name, class_=kind) for kind, sign, name in said), class_="legend"
    )


def _notes(module: Module, ids: Ids) -> dict[int, list[Html]]:
    """The notes above the lines of patches."""
    notes: dict[int, list[Html]] = {}
    for at, change in enumerate(module.changes):
        notes.setdefault(change.lines[0], []).append(_note(change, ids.row(at)))
    if module.slots:
        first = min(line for _, _, line in module.slots)
        listed = join((code(formula) for _, formula, _ in module.slots), ", ")
        said = tag(
            "p", tag("span", "Kernel slots", class_="why"), ": the guards below ask them for ", listed, "."
        )
        notes.setdefault(first, []).insert(0, tag("div", said))
    return notes


def _note(change: Change, row: str) -> Html:
    back = link(row, "to the table", class_="small", aria_label=f"{change.target}: to the table of patches")
    kind = _KINDS.get(change.kind, change.kind)
    if change.kind != _ROUTE:
        by = f"declared by {change.config}" + (f" for {change.declared}" if change.declared else "")
        why = change.reason or "no description was given"
        return tag("div", _said(f"{change.target}, {kind}", why, back), tag("p", by, class_="quiet small"))
    names = dict.fromkeys(f"{one.op}/{one.variant}" for one in change.places)
    formulas = dict.fromkeys(one.formula for one in change.places if one.formula)
    operands = change.reason.partition(": ")[2]
    why = join(
        [
            "this code computes ",
            join(map(code, names), " or ") if names else text(change.reason),
            *([": ", join(formulas, "; or ")] if formulas else []),
        ]
    )
    with_what = tag("p", f"Operands: {operands}", class_="quiet small") if operands and names else None
    return tag("div", _said(change.target, why, back), with_what, *map(_chosen, change.places))


def _said(head: str, why: object, back: Html) -> Html:
    return tag("p", tag("span", head, class_="why"), ": ", why, ". ", back)


def _chosen(place: Place) -> Html | None:
    if not place.answers:
        return None
    told = join((join([_backend(answer), f": {answer.why}"]) for answer in place.answers), "; ")
    return tag("p", "Kernel: ", told, class_="small")
