"""Markup that is made by functions: what is not `Html` already is text, and is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import TypeAlias

__all__ = ["Html", "code", "join", "link", "tag", "text"]

Attribute: TypeAlias = str | int | bool | None

_VOID = frozenset({"br", "col", "hr", "meta"})
# Text from source files and descriptions may hold what HTML cannot (control characters, halves of surrogate
# pairs) and what would show it in another order than it has (bidirectional controls).
_UNFIT = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


class Html(str):
    """Markup: put into a page as it is. Every other string is text."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return text as markup; characters that HTML cannot hold, or that reorder others, are spelled out."""
    if isinstance(value, Html):
        return value
    return Html(escape(_UNFIT.sub(lambda found: f"\\u{ord(found[0]):04x}", str(value))))


def tag(name: str, /, *children: object, **attributes: Attribute) -> Html:
    """Return an element.

    Args:
        name: its name.
        children: `Html` stays as it is, everything else is text; None is left out.
        attributes: ``class_`` is ``class``, and ``aria_label`` is ``aria-label``. None and False leave one
            out; True is one without a value.
    """
    words = [
        name,
        *(_attribute(key, value) for key, value in attributes.items() if value not in (None, False)),
    ]
    start = f"<{' '.join(words)}>"
    return Html(start) if name in _VOID else Html(f"{start}{join(children)}</{name}>")


def join(parts: Iterable[object], between: object = "") -> Html:
    """Return parts one after the other; None is left out."""
    return Html(text(between).join(text(part) for part in parts if part is not None))


def link(place: str, *children: object, **attributes: Attribute) -> Html:
    """Return a link to an element of the same page, by its id."""
    return tag("a", *children, href=f"#{place}", **attributes)


def code(value: object) -> Html:
    """Return a short piece of code within text."""
    return tag("code", value)


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    return name if value is True else f'{name}="{text(value)}"'
