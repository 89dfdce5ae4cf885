"""What installed distributions announce by entry point, read once a process."""

from __future__ import annotations

from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from typing import Any

__all__ = ["KERNELS", "PATCHES", "announced"]

#: Config modules: `veomni_hook.finders.configs` loads them.
PATCHES = "veomni_hook.patches"
#: Kernels: `veomni_hook.kernels.registry` loads them.
KERNELS = "veomni_hook.kernels"


@cache
def announced(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of ``group``, in the order of what they name."""
    return tuple(sorted(_every().select(group=group), key=lambda point: (point.value, point.name)))


@cache
def _every() -> Any:  # two types, from Python 3.12 on one
    # Reading every distribution's entry points costs milliseconds; they cannot change under a process.
    from importlib.metadata import entry_points

    return entry_points()
