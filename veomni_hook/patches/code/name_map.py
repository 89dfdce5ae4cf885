"""``name_map``: rename identifiers in the text of a replacement.

A name map renames identifiers that are equal to one of its keys, or that begin with one at a word boundary.
An identifier that already begins with the replacement stays, so applying a map twice has no further effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from veomni_hook.errors import NameMapError
from veomni_hook.patches.code.nearest_names import listed, nearest

__all__ = ["apply_name_map"]

_WORD = r"\w+"


def apply_name_map(
    text: str,
    name_map: Mapping[str, str] | None,
    *,
    where: str,
    target: str = "",
    tolerate: Callable[[NameMapError], None] | None = None,
) -> str:
    """Rename identifiers of ``text`` in code, strings and comments; longer keys come first.

    Args:
        text: the text.
        name_map: old names and new names.
        where: the location for error messages.
        target: the patch's target, for error messages.
        tolerate: called with the error instead of raising it; if it returns, the other keys apply.

    Raises:
        NameMapError: a key matches nothing in ``text``.
    """
    if not name_map:
        return text
    keys = sorted(name_map, key=len, reverse=True)
    whole = [
        rf"{_edge(key[0])}{re.escape(key)}{_edge(key[-1], after=True)}"
        for key in keys
        if not key.isidentifier()
    ]
    # Escape sequences come first; otherwise the n of "\nName" would be part of the name.
    pattern = re.compile("|".join([r"\\.", *whole, _WORD]), re.DOTALL)
    used: set[str] = set()
    mapped = pattern.sub(partial(_rename, keys=keys, name_map=name_map, used=used), text)
    unused = [key for key in name_map if key not in used]
    if unused:
        known = re.findall(_WORD, text)
        close = "; ".join(f"{key!r}: nearest {listed(nearest(key, known))}" for key in unused)
        error = NameMapError(
            f"name_map matches nothing in the replacement's source for {listed(map(repr, unused))}",
            where=where,
            fix=f"drop the entry or name an identifier (or the beginning of one) that occurs ({close})",
            target=target,
        )
        if tolerate is None:
            raise error
        tolerate(error)
    return mapped


def _rename(match: re.Match[str], *, keys: list[str], name_map: Mapping[str, str], used: set[str]) -> str:
    name = match.group()
    if name in name_map:
        used.add(name)
        return name_map[name]
    if not name.isidentifier():
        return name
    bare = name.lstrip("_")
    for key in keys:
        if not _begins(bare, key):
            continue
        used.add(key)
        new = name_map[key]
        if new.startswith(key) and (bare == new or _begins(bare, new)):
            return name
        return name[: len(name) - len(bare)] + new + bare[len(key) :]
    return name


def _begins(name: str, prefix: str) -> bool:
    """Whether ``name`` begins with ``prefix`` and has a word boundary after it."""
    if len(name) <= len(prefix) or not prefix or not name.startswith(prefix):
        return name == prefix
    last, following = prefix[-1], name[len(prefix)]
    return not (last.isdigit() and following.isdigit()) and not (last.isalnum() and following.islower())


def _edge(character: str, *, after: bool = False) -> str:
    if not (character.isalnum() or character == "_"):
        return ""
    return r"(?!\w)" if after else r"(?<!\w)"
