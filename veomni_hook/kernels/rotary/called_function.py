"""Checks whether the function that a call site would call is the modeling code's or a replacement."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch

from veomni_hook.kernels.shared.hub_functions import installed_for

__all__ = ["refuses", "refuses_wide", "replaced"]


def replaced(upstream: Any) -> str | None:
    """Return why ``upstream`` is not the modeling code's function, or None.

    If the package ``kernels`` is installed, transformers turns a rotary function into a module without
    weights. ``kernelize`` replaces such a module's ``forward`` by a hub kernel, or restores the original.
    """
    if type(upstream) is FunctionType or type(upstream) is MethodType:
        return None
    if hasattr(type(upstream), "kernel_layer_name") and installed_for(upstream) is None:
        return None
    return "a kernel from the hub replaces the upstream function"


def refuses(owner: object, *operands: object) -> str | None:
    """`replaced` for the last operand, as a rule of a kernel."""
    return replaced(operands[-1])


def refuses_wide(owner: object, *operands: object) -> str | None:
    """`refuses`, and rejects float64: upstream formulas in float32 differ in which operands they cast."""
    if any(getattr(operand, "dtype", None) is torch.float64 for operand in operands):
        return "an operand has dtype float64, for which the formulas in float32 differ"
    return refuses(owner, *operands)
