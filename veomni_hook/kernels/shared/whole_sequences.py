"""Calls that need whole sequences, where a process has a part of the positions only.

`veomni_hook.parallel.linear_attention` says how they get them; without it, every process has all positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["SEQUENCES", "Sequences", "whole"]


class Sequences:
    """What gives a call whole sequences, from the op's name, the module that calls, and the call."""

    wrap: Callable[[str, Any, Callable[..., Any]], Callable[..., Any]] | None = None


SEQUENCES = Sequences()


def whole(op: str, owner: object, call: Callable[..., object]) -> Callable[..., Any]:
    """Return ``call`` for a module that may have a part of each sequence; the same if none does."""
    wrap = SEQUENCES.wrap
    return call if wrap is None else wrap(op, owner, call)
