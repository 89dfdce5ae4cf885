"""A page read as a browser would: every element closed, ids once, links that lead somewhere, nothing to load."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

VOID = {"br", "col", "hr", "meta"}
# Elements that a page of ours is made of; anything else came from text that was not escaped.
KNOWN = VOID | {
    *("html", "head", "title", "style", "body", "header", "nav", "main", "section", "footer"),
    *("h1", "h2", "h3", "p", "ul", "li", "dl", "dt", "dd", "div", "span", "a", "b", "code", "ins", "del"),
    *("details", "summary", "table", "caption", "colgroup", "thead", "tbody", "tr", "th", "td"),
}


class Page(HTMLParser):
    """One page: its elements, ids, links and text; the first thing that is wrong is an AssertionError."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.heads: list[dict[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        twice = [name for name, count in Counter(self.ids).items() if count > 1]
        assert twice == []
        lost = [link for link in self.links if not link.startswith("#") or link[1:] not in self.ids]
        assert lost == []
        assert all(head.get("scope") in ("col", "row") for head in self.heads)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def handle_starttag(self, tag, attributes):
        assert tag in KNOWN, f"<{tag}> at {self.getpos()}"
        held = dict(attributes)
        assert not [name for name in held if name.startswith("on") or name in ("src", "srcset", "xlink:href")]
        assert len(held) == len(attributes), f"an attribute twice at {self.getpos()}"
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        if "id" in held:
            self.ids.append(held["id"])
        if "href" in held:
            self.links.append(held["href"])
        if tag == "th":
            self.heads.append(held)

    def handle_startendtag(self, tag, attributes):
        raise AssertionError(f"<{tag}/> at {self.getpos()}")

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]} at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)
