"""The frame of all pages (head, style, skip link, contents), and parts that any page can use.

A page is one file: it contains its style and has no scripts. Its content security policy forbids loading or
running anything, whatever text it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from veomni_hook import __version__
from veomni_hook.tools.report.html import Html, join, link, tag

__all__ = ["Entry", "badge", "facts", "page", "section", "style", "table", "value"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Entry:
    """One line of the contents: the id of a section, its name, and its subsections."""

    id: str
    name: str
    entries: tuple[Entry, ...] = ()


def page(
    title: str,
    body: Iterable[Html],
    *,
    lead: object = "",
    contents: Sequence[Entry] = (),
    styles: Sequence[str] = (),
) -> str:
    """Return a whole page.

    Args:
        title: its heading and the window's title, as text.
        body: the content of ``main``, below the heading.
        lead: the text directly below the heading.
        contents: links to sections of the body.
        styles: names of further style sheets of this package, without ``.css``.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"veomni-hook {__version__}"),
        tag("title", title),
        tag("style", Html("\n".join(style(name) for name in ("page", *styles)))),
    )
    shown = tag(
        "body",
        link("main", "Skip to the content", class_="skip"),
        tag("header", tag("h1", title), tag("p", lead, class_="lead") if lead else None),
        tag("nav", _listed(contents), aria_label="On this page") if contents else None,
        tag("main", *body, id="main", tabindex=-1),
        tag("footer", tag("p", f"Made by veomni-hook {__version__}.")),
    )
    return f"<!doctype html>\n{tag('html', head, shown, lang='en')}\n"


@cache
def style(name: str) -> str:
    """Return a style sheet of this package."""
    return files(__package__).joinpath(f"{name}.css").read_text(encoding="utf-8")


def section(id_: str, title: object, *children: object, level: int = 2) -> Html:
    """Return a section with a heading; the contents link to its id."""
    heading = tag(f"h{level}", title, id=f"{id_}-title")
    return tag("section", heading, *children, id=id_, aria_labelledby=f"{id_}-title")


def table(
    caption: object, heads: Sequence[object], rows: Iterable[Sequence[object]], *, kind: str = ""
) -> Html:
    """Return a table; the first cell of a row is its header.

    On narrow screens a row is shown as a block, with the name of the column before each cell.

    Args:
        caption: the content of the table; screen readers read it, and it is shown above the table.
        heads: the names of the columns, as text.
        rows: their cells.
        kind: a class for its style.
    """
    head = tag("tr", *(tag("th", one, scope="col") for one in heads))
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", head),
        tag("tbody", *(_row(heads, cells) for cells in rows)),
        class_=f"listing {kind}".strip(),
    )


def facts(pairs: Iterable[tuple[object, object]]) -> Html:
    """Return names and values as a row of boxes."""
    return tag(
        "dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts"
    )


def value(shown: object, about: object = "") -> Html:
    """Return a value of `facts`, with what it is about in small type."""
    return join([shown, tag("p", about, class_="quiet small") if about else None])


def badge(name: object, kind: str = "") -> Html:
    """Return a short word in a box; the word has the meaning, the colour only repeats it."""
    return tag("span", name, class_=f"badge {kind}".strip())


def _row(heads: Sequence[object], cells: Sequence[object]) -> Html:
    first, *others = cells
    named = zip(heads[1:], others, strict=True)
    return tag(
        "tr",
        tag("th", first, scope="row"),
        *(tag("td", cell, data_label=str(head)) for head, cell in named),
    )


def _listed(entries: Sequence[Entry]) -> Html:
    return tag(
        "ul",
        *(
            tag("li", join([link(one.id, one.name), _listed(one.entries) if one.entries else None]))
            for one in entries
        ),
    )
