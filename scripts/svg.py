"""A figure of matplotlib as an SVG file for documents: small, the same bytes each time, light and dark.

The picture has a background of its own and follows the reader's `prefers-color-scheme`, so that it can be
read on any page. The numbers that it shows are in its `<desc>`, where a test compares them with the results.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

INK, FAINT, PAPER = "#1f2328", "#d0d7de", "#ffffff"
DARK = {INK: "#e6edf3", FAINT: "#3d444d", PAPER: "#0d1117"}

# Colours of Okabe and Ito, which readers with any colour vision tell apart; names stand beside them anyway.
COLOURS = {
    "eager": "#8c959f",
    "compile": "#e69f00",
    "liger": "#56b4e9",
    "ours": "#d55e00",
    "ours+compile": "#009e73",
    "floor": FAINT,
}
NAMES = {
    "eager": "eager",
    "compile": "torch.compile",
    "liger": "Liger",
    "ours": "veomni-hook",
    "ours+compile": "veomni-hook and torch.compile",
    "floor": "floor",
}

RC = {
    "svg.hashsalt": "veomni-hook",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "figure.constrained_layout.h_pad": 0.08,
}


def described(title: str, data: Any) -> str:
    """Return what stands in the `<title>` and `<desc>` of a picture of this data."""
    numbers = json.dumps(data, separators=(",", ":"))
    return f"<title>{escape(title)}</title><desc>{escape(numbers)}</desc>"


def write(figure: Any, path: Path, title: str, data: Any) -> None:
    """Write a figure as SVG.

    Args:
        figure: of matplotlib, made under `RC`.
        path: the file; replaced if it is there.
        title: what the picture shows, for those who do not see it.
        data: the numbers that are drawn.
    """
    buffer = io.StringIO()
    # The names of the fields, each with nothing in it: a date or a version would change the bytes.
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    head = re.search(r"<svg [^>]*>", text)
    if head is None:
        raise ValueError("matplotlib wrote no <svg> element")
    root = head[0][:-1] + f' role="img" aria-label={quoteattr(title)}>'
    body = text[head.end() :]
    # Coordinates of six digits are exact to a millionth of a point, and half of the file.
    body = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", body)
    body = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = "\n".join(line.strip() for line in body.splitlines() if line.strip())
    path.write_text(f"{root}{described(title, data)}{_style()}\n{body}\n", encoding="utf-8")


def _style() -> str:
    """Return the rules that turn the picture's own colours into those for a dark page."""
    rules = [
        f'[style*="{what}: {light}"],[{what}="{light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    ]
    return f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"


def label(axis: Any, bars: Any, texts: Sequence[str], *, bold: bool = False) -> None:
    """Write a text at the end of each bar."""
    axis.bar_label(bars, texts, padding=3, fontsize=8, color=INK, fontweight="bold" if bold else "normal")
