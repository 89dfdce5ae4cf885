"""The HTML page of a comparison: one file, without scripts and without anything that it would load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from shlex import join
from typing import Any

from veomni_hook import __version__
from veomni_hook.compare.charts import Line, chart
from veomni_hook.compare.verdict import readable_time

__all__ = ["frame", "page_of", "table"]

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c1e21; --soft: #5f6670; --line: #d9dce1;
  --plain: #6b7280; --hooked: #c2334d; --good: #1a7f4b; --bad: #b42318; --panel: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15171a; --text: #e6e8eb; --soft: #a0a8b4; --line: #363b43;
    --plain: #9aa3b0; --hooked: #ff7a90; --good: #5fd39a; --bad: #ff8f85; --panel: #1e2126; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
.statement { font-size: 1.15rem; padding: .9rem 1.1rem; background: var(--panel);
  border-left: 4px solid var(--good); }
.statement.bad { border-color: var(--bad); }
p.facts, figcaption, .legend { color: var(--soft); }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
pre { padding: .75rem 1rem; background: var(--panel); overflow-x: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th:first-child, td:first-child, table.words th, table.words td { text-align: left; }
table.words tbody th { min-width: 11rem; } table.words td:last-child { min-width: 14rem; }
table:not(.words) td { white-space: nowrap; } thead th { color: var(--soft); font-weight: 600; }
figure { margin: 1rem 0; overflow-x: auto; }
svg { width: 100%; min-width: 30rem; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke-linejoin: round; } circle { stroke: none; }
polyline.plain { stroke: var(--plain); stroke-width: 3; stroke-opacity: .75; }
polyline.hooked { stroke: var(--hooked); stroke-width: 1.5; }
circle.plain { fill: var(--plain); } circle.hooked { fill: var(--hooked); }
.legend { list-style: none; padding: 0; margin: .25rem 0 0; display: flex; flex-wrap: wrap;
  gap: .25rem 1.25rem; }
.legend i { display: inline-block; width: 1.6rem; margin-right: .4rem; vertical-align: middle;
  border-top: 3px solid; }
.legend i.plain { border-color: var(--plain); } .legend i.hooked { border-color: var(--hooked); }
""".strip()


def frame(title: str, body: str) -> str:
    """Return a whole page; ``body`` is HTML, ``title`` is text."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], style: str = "") -> str:
    """Return a table of texts; the first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in others)
        # Names may be broken where their parts end.
        name = escape(str(first)).replace("_", "_<wbr>").replace("/", "/<wbr>")
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    named = f' class="{style}"' if style else ""
    body = "".join(lines)
    return (
        f'<div class="wide"><table{named}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def page_of(report: dict[str, Any], rows: Iterable[Sequence[str]]) -> str:
    """Return the page.

    Args:
        report: what `veomni_hook.compare.report` made of the runs.
        rows: its figures as texts: what, without, with, ratio.
    """
    style = "statement" if report["ok"] else "statement bad"
    parts = [
        "<h1>veomni-hook compare</h1>",
        f"<p class='{style}'>{escape(report['statement'])}</p>",
        f"<p class='facts'><code>{escape(join(report['command']))}</code><br>{escape(_facts(report))}</p>",
        *_failures(report),
    ]
    if report["without"]["runs"] or report["with"]["runs"]:
        parts += ["<h2>Figures</h2>", table(("", "without", "with the hook", "with / without"), rows)]
        parts += ["<h2>Losses</h2>", *_losses(report)]
        parts += ["<h2>Step times</h2>", _step_times(report)]
    if report["kernels"]:
        parts += ["<h2>What ran with the hook</h2>", _kernels(report["kernels"])]
    if report["notes"]:
        items = "".join(f"<li>{escape(note)}</li>" for note in report["notes"])
        parts.append(f"<h2>Notes</h2><ul>{items}</ul>")
    return frame("veomni-hook compare", "\n".join(parts))


def _facts(report: dict[str, Any]) -> str:
    world = report["world"] or 1
    told = [
        ", ".join(report["models"]),
        report["device"],
        report["precision"],
        f"{world} ranks (figures of rank 0, tokens of all)" if world > 1 else "",
        f"{report['steps']} steps a run, the first {report['warmup']} are not counted",
        f"veomni-hook {__version__}",
    ]
    return " · ".join(filter(None, told))


def _failures(report: dict[str, Any]) -> list[str]:
    return [
        f"<h2>{escape(run['label'])}: exit status {run['status']}</h2>"
        f"<pre>{escape(chr(10).join(run['last_lines']) or '(it printed nothing)')}</pre>"
        for run in report["runs"]
        if run["label"] in report["failed"]
    ]


def _losses(report: dict[str, Any]) -> list[str]:
    between, own = report["loss"]["without_and_with"]["by_step"], report["loss"]["two_without"]["by_step"]
    if not between:
        return ["<p>The losses are unknown.</p>"]
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
    headers = ("step", "without", "with the hook", "difference", "of two without")
    same = "<p>All runs have the same losses, bit for bit.</p>"
    title = "Largest relative difference of losses (logarithmic)"
    differing = chart(title, differences, lambda value: f"{value:.0e}", log=True)
    return [
        chart("Loss by step, every run", curves, lambda value: f"{value:.4g}"),
        same if all(value == 0 for value in (*between, *own)) else differing,
        f"<details><summary>Losses by step</summary>{table(headers, rows)}</details>",
    ]


def _step_times(report: dict[str, Any]) -> str:
    lines = [_line(run, run["step_seconds"], first=2) for run in report["runs"]]
    return chart("Step time by step, every run", lines, readable_time, zero=True)


def _kernels(kernels: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            f"{row['op']}/{row['variant']}",
            row["backend"] if row["ran"] else f"{row['backend']}, not called",
            row["places"],
            f"{row['calls']:,}",
            row["reason"],
        )
        for row in kernels
    ]
    return table(("op", "backend (eager: upstream's code)", "places", "calls", "reason"), rows, "words")


def _line(run: dict[str, Any], values: Sequence[float | None], first: int = 1) -> Line:
    return Line(
        "with the hook" if run["hooked"] else "without", "hooked" if run["hooked"] else "plain", values, first
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _share(values: Sequence[float | None], step: int) -> str:
    value = values[step - 1] if step <= len(values) else None
    return "-" if value is None else f"{value:.1e}"
