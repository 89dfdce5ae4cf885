"""What the caller of a guard may ask for that only a kernel gives, as the guard's variant declares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from veomni_hook.kernels.selection.declaration import Variant
from veomni_hook.kernels.selection.registry import load_attribute

__all__ = ["Request"]


class Request(NamedTuple):
    """The functions that `Variant.asks` and `Variant.settles` name, or None."""

    asks: Callable[..., Any] | None
    settles: Callable[..., object] | None

    @classmethod
    def of(cls, variant: Variant) -> Request:
        """Return what ``variant`` declares."""
        names = (variant.asks, variant.settles)
        return cls(*(None if name is None else load_attribute(name) for name in names))
