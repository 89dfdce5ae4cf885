"""The sizes of the parallel axes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sizes"]


@dataclass(frozen=True)
class Sizes:
    """How many processes share one sequence (``sp``), and how many share the experts of a layer (``ep``)."""

    sp: int = 1
    ep: int = 1

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """Return the sizes in the setting's canonical spelling, ``sp=2,ep=4``; axes left out have size 1."""
        pairs = (part.partition("=") for part in text.split(",") if part)
        return cls(**{axis: int(size) for axis, _, size in pairs})

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in vars(self).items() if size > 1) or "none"
