"""The complete report: figures, a section for each module, benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from veomni_hook.report.benchmarks import ID, Chart, benchmarks
from veomni_hook.report.html import Html, tag
from veomni_hook.report.model import Module
from veomni_hook.report.page import Entry, page, section
from veomni_hook.report.sections import Ids, entry, figures, module_section

__all__ = ["Report", "whole"]


@dataclass(frozen=True)
class Report:
    """The content of a page.

    Attributes:
        title: its heading.
        lead: a sentence below the heading.
        modules: the modules, in order.
        live: whether the answers are what ran in a model, with calls.
        notes: further sentences below the figures.
        charts: recorded benchmarks; None if there is no folder of records.
    """

    title: str
    lead: str
    modules: Sequence[Module]
    live: bool = False
    notes: Sequence[str] = ()
    charts: Sequence[Chart] | None = None


def whole(report: Report) -> str:
    """Return the page of a report."""
    taken: set[str] = set()
    ids = [Ids(module.label, taken) for module in report.modules]
    body = [figures(report.modules, live=report.live), *(tag("p", note) for note in report.notes)]
    body += [
        module_section(module, names, live=report.live)
        for module, names in zip(report.modules, ids, strict=True)
    ]
    entries = [entry(module, names) for module, names in zip(report.modules, ids, strict=True)]
    if not report.live:
        body.append(_benchmarks(report.charts))
        entries.append(Entry(ID, "Benchmarks"))
    return page(report.title, body, lead=report.lead, contents=entries, styles=("diff",))


def _benchmarks(charts: Sequence[Chart] | None) -> Html:
    if charts is not None:
        return benchmarks(charts)
    said = (
        "Recorded benchmarks are in a checkout of veomni-hook (benchmarks/results), and not in an installed"
        " package. `veomni-hook bench` measures here."
    )
    return section(ID, "Benchmarks", tag("p", said))
