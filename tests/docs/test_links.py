"""Links between documents lead somewhere, as a code host shows them; the strict build does the same for the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
_CODE = re.compile(r"(?ms)^ *(```+|~~~+).*?^ *\1 *$|(`+)(?!`).*?(?<!`)\2(?!`)")


def anchors(document: str) -> set[str]:
    """The anchors that code hosts give the headings of a document."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", document)
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"(?m)^#+ +(.+?) *#*$", text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one) is not None for one in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def broken(document: Path) -> list[str]:
    """The links of a document that lead nowhere."""
    text = _CODE.sub("", document.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r"\b(?:src|href|srcset)=\"([^\"\s]+)", text)
    found = []
    for target in targets:
        path, _, fragment = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = document.parent / path if path else document
        known = not fragment or (
            file.suffix == ".md" and file.is_file() and fragment in anchors(file.read_text())
        )
        if not file.exists() or not known:
            found.append(target)
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    assert broken(ROOT / document) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# What `x_y` is, and why\n## Twice\n## Twice\n```\n# no heading\n```\n")
    document = tmp_path / "a.md"
    document.write_text(
        "[1](b.md) [2](b.md#what-x_y-is-and-why) [3](b.md#twice-1) [4](https://example.org/x) `[code](no.md)`\n"
        '[5](c.md) [6](b.md#no-heading) <img src="d.png"> [7](#here)\n'
    )
    assert broken(document) == ["c.md", "b.md#no-heading", "#here", "d.png"]
