"""What a value of the setting ``precision`` says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.settings import FORMATS

__all__ = ["Precision", "in_force", "parsed"]


@dataclass(frozen=True)
class Precision:
    """What a value of the setting says.

    Attributes:
        format: what linear layers multiply in, one of `veomni_hook.settings.FORMATS`; empty: as upstream.
        first: how many layers of a decoder stay as they are, from the first on.
        last: how many, up to the last.
        skip: names of modules in a layer that stay, one or more parts of a dotted name each.
    """

    format: str = ""
    first: int = 0
    last: int = 0
    skip: tuple[str, ...] = ()


@cache
def parsed(text: str) -> Precision:
    """Return what a value says, in the form of `veomni_hook.settings`; empty: as upstream."""
    options = dict(part.partition("=")[::2] for part in text.split(",") if part)
    return Precision(
        format=next((name for name in FORMATS if name in options), ""),
        first=int(options.get("first", 0)),
        last=int(options.get("last", 0)),
        skip=tuple(name for name in options.get("skip", "").split("+") if name),
    )


def in_force() -> Precision:
    """Return what models multiply in that are made from now on."""
    return parsed(STATE.precision)
