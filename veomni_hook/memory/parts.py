"""The parts of the setting ``memory`` that are in force in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from veomni_hook.kernels.shared.sizes import SIZES
from veomni_hook.memory.host import BLOCKS

__all__ = ["Parts", "in_force", "is_in_force", "tell", "using"]


@dataclass(frozen=True)
class Parts:
    """What the setting asks for.

    Attributes:
        checkpoint: layers are checkpointed.
        offload: what checkpointed layers keep is on the host between forward and backward.
        host_bytes: the most bytes of host memory for that; 0: a share of what is free.
        tiles: MLPs and experts run on tiles of positions, and the loss on the fewest rows.
        tile_rows: positions of a tile; 0: so many that nothing in it is larger than twice the hidden states.
    """

    checkpoint: bool = False
    offload: bool = False
    host_bytes: int = 0
    tiles: bool = False
    tile_rows: int = 0


_NONE = Parts()
_told = _NONE


@cache
def _parsed(text: str) -> Parts:
    options = dict(part.partition("=")[::2] for part in text.split(",") if part)
    return Parts(
        checkpoint="checkpoint" in options,
        offload="offload" in options,
        host_bytes=int(options.get("offload") or 0),
        tiles="tiles" in options,
        tile_rows=int(options.get("tiles") or 0),
    )


def tell(text: str) -> None:
    """Set the parts: the value of the setting ``memory``; empty: none, and no host memory is held."""
    global _told  # noqa: PLW0603
    _told = _parsed(text)
    SIZES.least = _told.tiles
    if not _told.offload:
        BLOCKS.release()


@contextmanager
def using(text: str) -> Iterator[None]:
    """Set the parts for the block; host memory is held as before."""
    global _told
    before, _told = _told, _parsed(text)
    SIZES.least = _told.tiles
    try:
        yield
    finally:
        _told, SIZES.least = before, before.tiles


def is_in_force(text: str) -> bool:
    """Return whether the value ``text`` of the setting adds nothing to the parts in force."""
    wanted = _parsed(text)
    return all(getattr(_told, name) for name in ("checkpoint", "offload", "tiles") if getattr(wanted, name))


def in_force() -> Parts:
    """Return the parts in force."""
    return _told
