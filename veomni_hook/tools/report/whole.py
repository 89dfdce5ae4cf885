"""The complete report: figures, a section for each module, benchmarks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from veomni_hook.kernels.explain.rows import NO_KERNEL, NOT_CALLED
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.slot.candidates import REPLACED
from veomni_hook.layout import counted
from veomni_hook.patches.reasons import remedies
from veomni_hook.tools.report.benchmarks import Chart, by_place, step_of
from veomni_hook.tools.report.diff import side_by_side
from veomni_hook.tools.report.lines import Kind, pairs, split
from veomni_hook.tools.report.model import Module
from veomni_hook.tools.report.page import Entry, page

__all__ = ["whole"]

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
_NONE = (NO_KERNEL, REPLACED, NOT_CALLED)


def whole(
    title: str,
    lead: str,
    shown: Sequence[Module],
    *,
    live: bool = False,
    notes: Sequence[str] = (),
    charts: Sequence[Chart] = (),
) -> str:
    """Return the page.

    Args:
        title: its heading.
        lead: a sentence below the heading.
        shown: the modules, in order.
        live: whether the answers are what ran in a model, with calls.
        notes: further sentences below the figures.
        charts: recorded benchmarks, in a checkout.
    """
    modules = [*_named(shown)]
    contents: list[Entry] = []
    for module in modules:
        parts = (
            ("places", "Patches and kernels", module.patched is not None),
            ("unrouted", "Not routed", module.unrouted is not None),
            ("source", "Source", module.patched is not None),
        )
        inner = tuple((f"{module.id}-{part}", name, ()) for part, name, there in parts if there)
        contents.append((module.id, module.label, inner))
    if charts:
        contents.append(("benchmarks", "Benchmarks", ()))
    return page(
        "report.html",
        title=title,
        lead=lead,
        contents=contents,
        figures=[*_figures(modules, charts, live=live)],
        notes=notes,
        modules=modules,
        live=live,
        charts=[*by_place(charts)],
        side_by_side=side_by_side,
        remedies=remedies,
        KINDS=_KINDS,
        STATUS=_STATUS,
        ROUTE="route",
        EAGER=EAGER,
        NONE=_NONE,
        NO_REASON="no description was given",
    )


def _named(modules: Sequence[Module]) -> Iterator[Module]:
    """The modules with ids that are unique on the page; with the prefix, none can equal one of the frame."""
    taken: set[str] = set()
    for module in modules:
        base = re.sub(r"[^a-z0-9]+", "-", module.label.lower()).strip("-") or "module"
        names = (base if number == 1 else f"{base}-{number}" for number in count(1))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        id_ = f"module-{name}"
        changes = (replace(change, id=f"{id_}-patch-{at}") for at, change in enumerate(module.changes, 1))
        yield replace(module, id=id_, changes=tuple(changes))


def _figures(
    modules: Sequence[Module], charts: Sequence[Chart], *, live: bool
) -> Iterator[tuple[str, str, str]]:
    """Name, value and what it is about: what is fused and what is not, what was measured, and patches."""
    places = [place for module in modules for place in module.places]
    idle = (EAGER, *_NONE)
    fused = [p for p in places if any((one.training or one.backend) not in idle for one in p.answers)]
    left = [place.op for place in places if place not in fused]
    left += [o.op for module in modules for o in module.unrouted or () if o.status != "no kernel"]
    ran = [place.op for place in fused]
    for name, ops in (("Ran fused" if live else "Fused", ran), ("Upstream's code", left)):
        yield name, counted(len(ops), "place"), ", ".join(dict.fromkeys(ops))
    yield from step_of(charts)
    kinds = Counter[Kind]()
    for module in modules:
        if module.patched is not None and module.original is not None:
            kinds.update(pair.kind for pair in pairs(split(module.original), split(module.patched)))
    added, removed = kinds[Kind.ADDED] + kinds[Kind.CHANGED], kinds[Kind.REMOVED] + kinds[Kind.CHANGED]
    patches = sum(len(module.changes) for module in modules)
    yield "Patches", f"{patches}", f"+{added:,} −{removed:,} lines"  # noqa: RUF001 - the minus sign
