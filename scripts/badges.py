"""The badges of the README, made from the project's metadata: `python -m scripts.badges` writes them.

They are files in docs/images, so the page needs no other server. A test compares them with the metadata.
"""

from __future__ import annotations

import html
import tomllib
from pathlib import Path

from veomni_hook.releases import span

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
#: The width of a character and the margin of a text, in pixels; the height of a badge.
CHARACTER, MARGIN, HEIGHT = 6.6, 7, 20


def texts() -> dict[str, tuple[str, str]]:
    """Name, label and value of each badge."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "python": ("python", project["requires-python"].removeprefix(">=") + "+"),
        "transformers": ("transformers", span("transformers")),
        "license": ("license", project["license"]),
    }


def badge(label: str, value: str) -> str:
    """A badge as SVG: the label in grey, the value in blue."""
    left, right = (round(CHARACTER * len(text) + 2 * MARGIN) for text in (label, value))
    label, value = html.escape(label), html.escape(value)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HEIGHT}" role="img"'
        f' aria-label="{label}: {value}">\n'
        f"  <title>{label}: {value}</title>\n"
        f'  <rect width="{left}" height="{HEIGHT}" fill="#4b5563"/>\n'
        f'  <rect x="{left}" width="{right}" height="{HEIGHT}" fill="#1d4ed8"/>\n'
        '  <g fill="#fff" font-family="Verdana, sans-serif" font-size="11" text-anchor="middle">\n'
        f'    <text x="{left / 2:g}" y="14">{label}</text>\n'
        f'    <text x="{left + right / 2:g}" y="14">{value}</text>\n'
        "  </g>\n"
        "</svg>\n"
    )


def files() -> dict[Path, str]:
    """The path and content of every badge."""
    return {IMAGES / f"badge-{name}.svg": badge(*text) for name, text in texts().items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
