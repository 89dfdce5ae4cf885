"""Compare and rename names: edit distance, nearest names for messages, and ``name_map``.

A name map renames identifiers that are equal to one of its keys, or that begin with one at a word boundary.
An identifier that already begins with the replacement stays, so applying a map twice has no further effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from veomni_hook.errors import NameMapError

__all__ = ["apply_name_map", "distance", "is_near_miss", "listed", "nearest"]

NEAR_MISS = 2
_WORD = r"\w+"


def distance(one: str, other: str) -> int:
    """Edit distance: insertions, deletions and substitutions of single characters."""
    previous = list(range(len(other) + 1))
    for row, left in enumerate(one, start=1):
        current = [row]
        for column, right in enumerate(other, start=1):
            current.append(min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (left != right)))
        previous = current
    return previous[-1]


def is_near_miss(name: str, existing: str) -> bool:
    """Whether ``name`` is so close to another name that it is probably a typo."""
    return (
        name != existing
        and abs(len(name) - len(existing)) <= NEAR_MISS
        and distance(name, existing) <= NEAR_MISS
    )


def nearest(name: str, names: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Up to ``limit`` of the closest ``names``, best first, without names that have little in common.

    Letters that differ only in case count half. A dotted name is also compared by its last part.
    """
    ranked = sorted((*_cost(name, other), other) for other in set(names) if other != name)
    return tuple(other for cost, length, other in ranked if cost < length * 0.7)[:limit]


def listed(names: Iterable[str]) -> str:
    """Names for a message: ``a, b, c``, or ``none``."""
    return ", ".join(names) or "none"


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


def _cost(name: str, other: str) -> tuple[float, int]:
    """The distance of two names, and the length by which to normalise it."""
    cost, length = _folded(name, other), max(len(name), len(other))
    owner, _, last = name.rpartition(".")
    other_owner, _, other_last = other.rpartition(".")
    if owner and other_owner:
        return min(cost, _folded(owner, other_owner) * 2 + _folded(last, other_last)), length
    if other_owner and (by_last := _folded(last, other_last) + 1) < cost:
        return by_last, max(len(last), len(other_last))
    return cost, length


def _folded(name: str, other: str) -> float:
    return (distance(name, other) + distance(name.lower(), other.lower())) / 2
