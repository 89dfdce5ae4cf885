"""The parts of the setting ``memory`` that are in force in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from veomni_hook.kernels.shared.sizes import SIZES
from veomni_hook.settings import AUTO, MEMORY
from veomni_hook.sizes import bytes_of

__all__ = [
    "LADDER",
    "Parts",
    "choose",
    "in_force",
    "is_in_force",
    "is_shared",
    "parsed",
    "say",
    "step",
    "tell",
    "using",
]

#: What lowers the memory of a step, from the fastest to the one that needs the least.
LADDER = ("checkpoint", "checkpoint,offload", "checkpoint,tiles", "checkpoint,offload,tiles")


@dataclass(frozen=True)
class Parts:
    """What the setting asks for.

    Attributes:
        checkpoint: layers are checkpointed.
        offload: what checkpointed layers keep is on the host between forward and backward.
        host_bytes: the most bytes of host memory for that; 0: a share of what is free.
        tiles: MLPs and experts run on tiles of positions, and the loss on the fewest rows.
        tile_rows: positions of a tile; 0: so many that nothing in it is larger than twice the hidden states.
        budget: the bytes that a step may take, for which parts are chosen when a model trains; 0: those that
            the device has; None: the setting names the parts.
    """

    checkpoint: bool = False
    offload: bool = False
    host_bytes: int = 0
    tiles: bool = False
    tile_rows: int = 0
    budget: int | None = None


_NONE = Parts()
_in_force = _NONE


@dataclass
class _Told:
    """What was told last: the setting, whether processes share models, and what takes notes for the user."""

    text: str = ""
    shared: bool = False
    say: Callable[[str], None] | None = None


_told = _Told()


@cache
def parsed(text: str) -> Parts:
    """Return the parts that a value of the setting says; none yet for a budget."""
    options = dict(part.partition("=")[::2] for part in text.split(",") if part)
    if options.keys() - MEMORY.keys():
        return Parts(budget=0 if text == AUTO else bytes_of(text))
    return Parts(
        checkpoint="checkpoint" in options,
        offload="offload" in options,
        host_bytes=bytes_of(options.get("offload") or 0),
        tiles="tiles" in options,
        tile_rows=int(options.get("tiles") or 0),
    )


def tell(text: str, *, shared: bool = False, say: Callable[[str], None] | None = None) -> None:
    """Set the parts: the value of the setting ``memory``; empty: none, and no host memory is held.

    What was chosen for a budget stays if the same is told again.

    Args:
        text: the value.
        shared: processes share sequences or experts of a model, so that all have to choose the same.
        say: gets what was chosen, a line for the user.
    """
    if text != _told.text:
        _set(parsed(text))
    _told.text, _told.shared, _told.say = text, shared, say
    # Blocks exist where their module, which imports torch, was imported.
    if not _in_force.offload and (host := sys.modules.get("veomni_hook.memory.host")) is not None:
        host.BLOCKS.release()


def say(line: str) -> None:
    """Tell the user what was chosen."""
    if _told.say is not None:
        _told.say(line)


def is_shared() -> bool:
    """Return whether processes share sequences or experts of a model."""
    return _told.shared


def choose(text: str) -> None:
    """Put parts in force for the budget that is."""
    _set(replace(parsed(text), budget=_in_force.budget))


def step() -> int:
    """Return the place in `LADDER` of what was chosen last; 0: nothing was."""
    chosen = [replace(parsed(text), budget=_in_force.budget) for text in LADDER]
    return chosen.index(_in_force) if _in_force in chosen else 0


def _set(parts: Parts) -> None:
    global _in_force
    _in_force, SIZES.least = parts, parts.tiles


@contextmanager
def using(parts: Parts) -> Iterator[None]:
    """Set the parts for the block; host memory is held as before."""
    before = _in_force
    _set(parts)
    try:
        yield
    finally:
        _set(before)


def is_in_force(text: str) -> bool:
    """Return whether the value ``text`` of the setting adds nothing to the parts in force."""
    wanted = parsed(text)
    return all(getattr(_in_force, name) for name in MEMORY if getattr(wanted, name))


def in_force() -> Parts:
    """Return the parts in force."""
    return _in_force
