"""Elementwise operations that a model applies to logits between its head and its loss."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["IDENTITY", "Transform"]


class Transform(NamedTuple):
    """``softcap * tanh(dtype(logits) * scale / divisor / softcap)``; None skips a step."""

    dtype: torch.dtype | None = None
    scale: float | None = None
    divisor: float | None = None
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the transformed ``logits``, rounded where upstream rounds."""
        if self.dtype is not None:
            logits = logits.to(self.dtype)
        if self.scale is not None:
            logits = logits * self.scale
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def factor(self) -> float:
        """The factor of logits before the cap."""
        scale = 1.0 if self.scale is None else self.scale
        return scale if self.divisor is None else scale / self.divisor

    def refuses(self) -> str | None:
        """Return why a kernel cannot apply this, or None."""
        for name in ("scale", "divisor", "softcap"):
            value = getattr(self, name)
            if not isinstance(value, (int, float, type(None))):
                return f"the {name} of the logits is a {type(value).__name__}, not a number"
        if self.dtype is not None and not self.dtype.is_floating_point:
            return f"logits are cast to {self.dtype}"
        return None


IDENTITY = Transform()
