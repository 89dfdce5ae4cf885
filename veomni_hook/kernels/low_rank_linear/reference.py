"""A linear layer with low-rank terms by definition: the oracle for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["product_added"]

Tensor = torch.Tensor


def product_added(
    x: Tensor,
    linear: Callable[[Tensor], Tensor],
    adapters: Sequence[tuple[Callable[[Tensor], Tensor], Any, Any, float, Any]],
) -> Tensor:
    """Return ``linear(x)`` plus ``up(down(dropout(x))) * scale`` of every adapter, in its dtype.

    ``adapters`` are tuples of ``dropout``, ``down`` (``in`` to ``rank``), ``up`` (``rank`` to ``out``),
    ``scale`` and None; each adapter computes in the dtype of ``down``'s weight.
    """
    result = linear(x)
    dtype = result.dtype
    for dropout, down, up, scale, _ in adapters:
        x = x.to(down.weight.dtype)
        result = result + up(down(dropout(x))) * scale
    return result.to(dtype)
