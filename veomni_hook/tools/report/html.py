"""Functions that create markup: everything that is not `Html` is text, and is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

from veomni_hook.printable import printable

__all__ = ["Html", "code", "join", "link", "tag", "text"]

Attribute: TypeAlias = str | int | bool | None

_VOID = frozenset({"br", "col", "hr", "meta"})


class Html(str):
    """Markup, inserted into a page unchanged. Every other string is text."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return text as markup; characters that HTML does not allow, or that reorder others, are escaped."""
    if isinstance(value, Html):
        return value
    return Html(escape(printable(str(value))))


def tag(name: str, /, *children: object, **attributes: Attribute) -> Html:
    """Return an element.

    Args:
        name: its name.
        children: `Html` stays unchanged, everything else is text; None is skipped.
        attributes: ``class_`` is ``class``, and ``aria_label`` is ``aria-label``. None and False are skipped;
            True is an attribute without a value.
    """
    words = [
        name,
        *(_attribute(key, value) for key, value in attributes.items() if value not in (None, False)),
    ]
    start = f"<{' '.join(words)}>"
    return Html(start) if name in _VOID else Html(f"{start}{join(children)}</{name}>")


def join(parts: Iterable[object], between: object = "") -> Html:
    """Return concatenated parts; None is skipped."""
    return Html(text(between).join(text(part) for part in parts if part is not None))


def link(place: str, *children: object, **attributes: Attribute) -> Html:
    """Return a link to an element of the page, by its id."""
    return tag("a", *children, href=f"#{place}", **attributes)


def code(value: object) -> Html:
    """Return inline code."""
    return tag("code", value)


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    return name if value is True else f'{name}="{text(value)}"'
