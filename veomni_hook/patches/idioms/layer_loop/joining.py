"""What is known of a value that is one of two."""

from __future__ import annotations

from veomni_hook.patches.idioms.layer_loop.shapes import fresh
from veomni_hook.patches.idioms.layer_loop.values import (
    EMPTY,
    NOTHING,
    PLAIN,
    Items,
    Many,
    Maybe,
    Module,
    Plain,
    Size,
    Tensor,
    Unknown,
    Value,
    Whole,
    is_positional,
)

__all__ = ["joined"]


def joined(one: Value, other: Value) -> Value:
    """What is known of a value that is one or the other."""
    if other in (one, EMPTY):
        return one
    if one == EMPTY:
        return other
    if NOTHING in (one, other):
        rest = other if one == NOTHING else one
        return rest if isinstance(rest, Maybe | Whole | Plain) else Maybe(rest)
    if isinstance(one, Maybe) or isinstance(other, Maybe):
        bare = [each.value if isinstance(each, Maybe) else each for each in (one, other)]
        return joined(NOTHING, joined(*bare))
    return _alike(one, other) or _mixed(one, other) or Unknown("a value that differs between branches")


def _alike(one: Value, other: Value) -> Value | None:
    """Two values of one kind."""
    if isinstance(one, Tensor) and isinstance(other, Tensor) and len(one.dims) == len(other.dims):
        pairs = list(zip(one.dims, other.dims, strict=True))
        if all(a == b or not (is_positional(a) or is_positional(b)) for a, b in pairs):
            return Tensor(tuple(a if a == b else fresh() for a, b in pairs))
    if isinstance(one, Items) and isinstance(other, Items) and len(one.values) == len(other.values):
        return Items(tuple(joined(a, b) for a, b in zip(one.values, other.values, strict=True)))
    if isinstance(one, Many) and isinstance(other, Many):
        return Many(joined(one.value, other.value))
    if isinstance(one, Module) and isinstance(other, Module):
        return Module(tuple(dict.fromkeys((*one.names, *other.names))), one.made)
    return None


def _mixed(one: Value, other: Value) -> Value | None:
    """Two values of which one may be a number, or a mask."""
    if isinstance(one, Plain | Size) and isinstance(other, Plain | Size):
        positional = [each for each in (one, other) if isinstance(each, Size) and is_positional(each.dim)]
        return None if positional else PLAIN
    if isinstance(one, Whole) and isinstance(other, Whole) and one.held != other.held:
        return None
    if isinstance(one, Whole | Plain) and isinstance(other, Whole | Plain):
        if isinstance(one, Whole) and isinstance(other, Whole):
            return Whole(" or ".join(dict.fromkeys((*one.name.split(" or "), *other.name.split(" or ")))))
        return one if isinstance(one, Whole) else other
    return None
