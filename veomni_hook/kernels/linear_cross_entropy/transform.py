"""Elementwise operations that a model applies to logits between its head and its loss."""

from __future__ import annotations

from typing import NamedTuple

import torch

from veomni_hook.errors import KernelError

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

    def at(self, temperature: float, caller: str = "linear_cross_entropy") -> Transform:
        """Return this transform with its result divided by ``temperature``.

        A cap of ``c`` over ``T`` is a cap of ``c / T`` of logits that are scaled by ``1 / T``. An error names
        the ``caller``.

        Raises:
            KernelError: the temperature is not a positive number.
        """
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not temperature > 0:
            tensor = isinstance(temperature, torch.Tensor)
            raise KernelError(
                f"temperature is {temperature!r}, not a {'Python' if tensor else 'positive'} number",
                where=caller,
                fix=f"pass a number above 0{', not a tensor' * tensor}; 1 leaves the logits as they are",
            )
        if temperature == 1:
            return self
        softcap = None if self.softcap is None else self.softcap / temperature
        return Transform(torch.float32, self.factor / temperature, None, softcap)

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
