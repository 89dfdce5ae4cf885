"""The complete report: figures, a section for each module, benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from veomni_hook.tools.report.benchmarks import ID, Chart, benchmarks, step_of
from veomni_hook.tools.report.html import tag
from veomni_hook.tools.report.model import Module
from veomni_hook.tools.report.page import Entry, page
from veomni_hook.tools.report.sections import Ids, entry, figures, module_section

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
        charts: recorded benchmarks, in a checkout.
    """

    title: str
    lead: str
    modules: Sequence[Module]
    live: bool = False
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()


def whole(report: Report) -> str:
    """Return the page of a report."""
    taken: set[str] = set()
    ids = [Ids(module.label, taken) for module in report.modules]
    body = [
        figures(report.modules, step_of(report.charts), live=report.live),
        *(tag("p", note) for note in report.notes),
    ]
    body += [
        module_section(module, names, live=report.live)
        for module, names in zip(report.modules, ids, strict=True)
    ]
    entries = [entry(module, names) for module, names in zip(report.modules, ids, strict=True)]
    if report.charts:
        body.append(benchmarks(report.charts))
        entries.append(Entry(ID, "Benchmarks"))
    return page(report.title, body, lead=report.lead, contents=entries, styles=("diff",))
