"""Compare names: edit distance, and the nearest names for messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["distance", "is_near_miss", "listed", "nearest"]

NEAR_MISS = 2
_MOST = 3


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


def nearest(name: str, names: Iterable[str], apart: float = 0.7) -> tuple[str, ...]:
    """Up to three of the closest ``names``, best first, without names that have little in common.

    Letters that differ only in case count half. A dotted name is also compared by its last part.

    Args:
        apart: how many of a name's letters may differ, as a share.
    """
    ranked = sorted((*_cost(name, other), other) for other in set(names) if other != name)
    return tuple(other for cost, length, other in ranked if cost < length * apart)[:_MOST]


def listed(names: Iterable[str]) -> str:
    """Names for a message: ``a, b, c``, or ``none``."""
    return ", ".join(names) or "none"


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
