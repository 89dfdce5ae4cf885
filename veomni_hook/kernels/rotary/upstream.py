"""Whether the function that a call site would call is the modeling code, or something put in its place."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch

__all__ = ["refuses", "refuses_wide", "replaced"]


def replaced(upstream: Any) -> str | None:
    """Return why ``upstream`` is not the modeling code's function, or None.

    transformers makes a rotary function a module without weights where the package ``kernels`` is installed;
    ``kernelize`` puts a hub kernel in the place of such a module's ``forward``, or the class's own again.
    """
    if type(upstream) is FunctionType or type(upstream) is MethodType:
        return None
    if hasattr(type(upstream), "kernel_layer_name"):
        forward = vars(upstream).get("forward")
        if forward is None or getattr(forward, "__func__", None) is type(upstream).forward:
            return None
    return "a kernel from the hub stands in the place of the upstream function"


def refuses(owner: Any, *operands: Any) -> str | None:
    """`replaced` for the last operand, as a kernel's rule."""
    return replaced(operands[-1])


def refuses_wide(owner: Any, *operands: Any) -> str | None:
    """`refuses`, and float64: formulas that say float32 once may say it of every operand, or not."""
    if any(getattr(operand, "dtype", None) is torch.float64 for operand in operands):
        return "an operand is float64, where formulas in float32 differ"
    return refuses(owner, *operands)
