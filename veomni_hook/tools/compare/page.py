"""The HTML page of a comparison, in the frame of `veomni_hook.tools.report`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from shlex import join

from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.tools.compare.charts import Line, chart
from veomni_hook.tools.compare.kernels import named
from veomni_hook.tools.compare.report import Report
from veomni_hook.tools.compare.verdict import readable_time
from veomni_hook.tools.facts import Facts
from veomni_hook.tools.report.page import page

__all__ = ["page_of"]


def page_of(report: Report, rows: Iterable[Sequence[str]]) -> str:
    """Return the page: one file without scripts, which loads nothing.

    Args:
        report: what `veomni_hook.tools.compare.report` made of the runs.
        rows: its figures as texts: what, without, with, ratio.
    """
    good = report["ok"] and report["time"]["verdict"] in ("faster", "same")
    seen = report["without"]["runs"] or report["with"]["runs"]
    failures = [
        (f"failure-{number}", f"{run['label']}: exit status {run['status']}", run)
        for number, run in enumerate(report["runs"], start=1)
        if run["label"] in report["failed"]
    ]
    sections = (
        ("figures", "Figures", seen),
        ("losses", "Losses", seen),
        ("times", "Step times", seen),
        ("why", "Why", report["why"]),
        ("kernels", "What ran with the hook", report["kernels"]),
        ("notes", "Notes", report["notes"]),
    )
    world = report["world"] or 1
    facts = (
        ("model", ", ".join(report["models"])),
        ("device", report["device"]),
        ("precision", report["precision"]),
        ("ranks (figures of rank 0, tokens of all)", world if world > 1 else None),
        ("steps of each run", report["steps"]),
        ("first steps that do not count", report["warmup"]),
    )
    times = [_line(run, run["step_seconds"], first=2) for run in report["runs"]]
    return page(
        "compare.html",
        title="veomni-hook compare",
        command=join(report["command"]),
        contents=[(id_, title, ()) for id_, title, there in (*failures, *sections) if there],
        kind="statement" if good else "statement unsure" if report["ok"] else "statement bad",
        report=report,
        facts=[(name, value) for name, value in facts if value],
        failures=failures,
        rows=[*rows] if seen else [],
        times=chart("Step time by step, every run", times, readable_time, zero=True),
        named=named,
        EAGER=EAGER,
        **_losses(report),
    )


def _losses(report: Report) -> dict[str, object]:
    between, own = report["loss"]["without_and_with"]["by_step"], report["loss"]["two_without"]["by_step"]
    curves = [_line(run, run["losses"]) for run in report["runs"]]
    differences = [
        Line("two runs without", "plain", own),
        Line("without and with the hook", "hooked", between),
    ]
    plain, hooked = report["curves"]["without"], report["curves"]["with"]
    losses = [
        (
            step + 1,
            *("-" if loss is None else f"{loss:.6f}" for loss in pair),
            *("-" if step >= len(column) else f"{column[step]:.1e}" for column in (between, own)),
        )
        for step, pair in enumerate(zip(plain, hooked, strict=False))
    ]
    title = "Largest relative difference of losses (logarithmic)"
    return {
        "losses": losses if between else [],
        "identical": all(value == 0 for value in (*between, *own)),
        "curves": chart("Loss by step, every run", curves, lambda value: f"{value:.4g}"),
        "differences": chart(title, differences, lambda value: f"{value:.0e}", log=True),
    }


def _line(run: Facts, values: Sequence[float | None], first: int = 1) -> Line:
    return Line(
        "with the hook" if run["hooked"] else "without", "hooked" if run["hooked"] else "plain", values, first
    )
