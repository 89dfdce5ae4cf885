"""The HTML page of a comparison, in the frame of `veomni_hook.tools.report`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from shlex import join
from typing import Any

from veomni_hook.tools.compare.charts import Line, chart
from veomni_hook.tools.compare.kernels import named
from veomni_hook.tools.compare.verdict import readable_time
from veomni_hook.tools.report.html import Html, code, tag, text
from veomni_hook.tools.report.page import Entry, badge, facts, page, section, table

__all__ = ["page_of"]

_EAGER = "eager"


def page_of(report: dict[str, Any], rows: Iterable[Sequence[str]]) -> str:
    """Return the page: one file without scripts, which loads nothing.

    Args:
        report: what `veomni_hook.tools.compare.report` made of the runs.
        rows: its figures as texts: what, without, with, ratio.
    """
    sections = [*_failures(report), *_sections(report, rows)]
    good = report["ok"] and report["time"]["verdict"] in ("faster", "same")
    kind = "statement" if good else "statement unsure" if report["ok"] else "statement bad"
    statement = tag("p", report["statement"], class_=kind)
    return page(
        "veomni-hook compare",
        [statement, facts(_facts(report)), *(section(id_, name, *parts) for id_, name, *parts in sections)],
        lead=code(join(report["command"])),
        contents=[Entry(id_, str(name)) for id_, name, *_ in sections],
        styles=("compare",),
    )


def _facts(report: dict[str, Any]) -> Iterator[tuple[str, object]]:
    world = report["world"] or 1
    for name, value in (
        ("model", ", ".join(report["models"])),
        ("device", report["device"]),
        ("precision", report["precision"]),
        ("ranks (figures of rank 0, tokens of all)", world if world > 1 else None),
        ("steps of each run", report["steps"]),
        ("first steps that do not count", report["warmup"]),
    ):
        if value:
            yield name, value


def _failures(report: dict[str, Any]) -> Iterator[tuple[str, object, Html]]:
    for number, run in enumerate(report["runs"], start=1):
        if run["label"] in report["failed"]:
            lines = "\n".join(run["last_lines"]) or "(it printed nothing)"
            yield f"failure-{number}", f"{run['label']}: exit status {run['status']}", tag("pre", lines)


def _sections(report: dict[str, Any], rows: Iterable[Sequence[str]]) -> Iterator[tuple[Any, ...]]:
    """Yield the id, the heading and the parts of each section."""
    if report["without"]["runs"] or report["with"]["runs"]:
        heads = ("", "without", "with the hook", "with / without")
        yield "figures", "Figures", table("Medians and peaks of all runs", heads, rows, kind="figures")
        yield "losses", "Losses", *_losses(report)
        yield "times", "Step times", _step_times(report)
    if report["why"]:
        yield "why", "Why", *(tag("p", sentence) for sentence in report["why"])
    if report["kernels"]:
        yield "kernels", "What ran with the hook", _kernels(report["kernels"])
    if report["notes"]:
        yield "notes", "Notes", tag("ul", *(tag("li", note) for note in report["notes"]))


def _losses(report: dict[str, Any]) -> Iterator[Html]:
    between, own = report["loss"]["without_and_with"]["by_step"], report["loss"]["two_without"]["by_step"]
    if not between:
        yield tag("p", "The losses are unknown.")
        return
    curves = [_line(run, run["losses"]) for run in report["runs"]]
    differences = [
        Line("two runs without", "plain", own),
        Line("without and with the hook", "hooked", between),
    ]
    plain, hooked = report["curves"]["without"], report["curves"]["with"]
    rows = [
        (step, *map(_loss, pair), _share(between, step), _share(own, step))
        for step, pair in enumerate(zip(plain, hooked, strict=False), start=1)
    ]
    heads = ("step", "without", "with the hook", "difference", "difference of two without")
    title = "Largest relative difference of losses (logarithmic)"
    shown = chart("Loss by step, every run", curves, lambda value: f"{value:.4g}")
    if all(value == 0 for value in (*between, *own)):
        yield shown
        yield tag("p", "All runs have the same losses, bit for bit.")
    else:
        yield tag(
            "div", shown, chart(title, differences, lambda value: f"{value:.0e}", log=True), class_="charts"
        )
    listed = table("Mean losses of the runs, and their largest differences", heads, rows, kind="figures")
    yield tag("details", tag("summary", "Losses by step"), listed)


def _step_times(report: dict[str, Any]) -> Html:
    lines = [_line(run, run["step_seconds"], first=2) for run in report["runs"]]
    return chart("Step time by step, every run", lines, readable_time, zero=True)


def _kernels(kernels: Sequence[dict[str, Any]]) -> Html:
    rows = [
        (
            _breakable(f"{row['op']}/{row['variant']}"),
            _backend(row),
            row["places"],
            f"{row['calls']:,}",
            row["reason"],
        )
        for row in kernels
    ]
    return table("The first run with the hook", ("op", "backend", "places", "calls", "reason"), rows)


def _backend(row: dict[str, Any]) -> Html:
    name = named(row).replace(_EAGER, f"{_EAGER} (upstream's code)")
    return badge(name, "own" if row["ran"] and row["backend"] != _EAGER else "")


def _breakable(name: str) -> Html:
    """A name with line break opportunities between its parts."""
    return Html(text(name).replace("_", "_<wbr>").replace("/", "/<wbr>"))


def _line(run: dict[str, Any], values: Sequence[float | None], first: int = 1) -> Line:
    return Line(
        "with the hook" if run["hooked"] else "without", "hooked" if run["hooked"] else "plain", values, first
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _share(values: Sequence[float | None], step: int) -> str:
    value = values[step - 1] if step <= len(values) else None
    return "-" if value is None else f"{value:.1e}"
