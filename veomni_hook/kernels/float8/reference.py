"""Products in float8 by definition: what a CPU computes, and the oracle for the kernels.

A row x of a matrix is stored as ``q = x / s`` in float8 (e4m3: 3 bits of mantissa, at most 448), with the
scale s = 2^k, the smallest power of two for which no element of the row exceeds 448 s. So ``|s q - x|`` is at
most ``2^-4 |x|``, or ``2^-10 s`` for elements below ``2^-6 s``. A row with an infinity or a NaN has the scale
NaN, and so have all results that it is part of.

In MX (OCP Microscaling Formats 1.0, MXFP8) each 32 neighbours of a row have a scale of their own, which is
stored as the byte k + 127, or 255 for NaN (E8M0).
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["FLOAT8", "LARGEST", "LEAST", "SHARED", "dequantised", "product", "quantised", "scales"]

Tensor = torch.Tensor

FLOAT8 = torch.float8_e4m3fn
#: The largest number of the format.
LARGEST = 448.0
#: Rows without a larger element, such as zeros, have the scale of this one.
LEAST = 2.0**-100
#: Neighbours that share a scale in MX.
SHARED = 32


def scales(x: Tensor) -> Tensor:
    """Return the scale of each row of ``x [rows, columns]``, float32 ``[rows, 1]``."""
    largest = x.abs().amax(1, keepdim=True).float()
    mantissa, exponent = torch.frexp(largest.clamp(min=LEAST) / LARGEST)  # mantissa in [0.5, 1)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return torch.where(largest.isfinite(), scale, torch.nan)


def quantised(x: Tensor, *, mx: bool = False) -> tuple[Tensor, Tensor]:
    """Return ``x [rows, columns]`` in float8, and its `scales`; in MX bytes ``[rows, columns / 32]``.

    The last of these may be of fewer columns.
    """
    rows, columns = x.shape
    if not mx:
        scale = scales(x) if columns else x.new_ones(rows, 1, dtype=torch.float32)
        return (x.float() / scale).to(FLOAT8), scale
    parts = functional.pad(x, (0, -columns % SHARED)).reshape(-1, SHARED)
    values, scale = quantised(parts)
    exponents = torch.where(scale.isnan(), 255, torch.frexp(scale).exponent + 126)
    return values.view(rows, -1)[:, :columns], exponents.to(torch.uint8).view(rows, -1)


def dequantised(values: Tensor, scale: Tensor) -> Tensor:
    """Return what a `quantised` matrix is, in float32."""
    if scale.dtype is torch.uint8:
        powers = torch.ldexp(scale.new_ones(scale.shape, dtype=torch.float32), scale.int() - 127)
        of_each = torch.where(scale == 255, torch.nan, powers).repeat_interleave(SHARED, 1)
        scale = of_each[:, : values.shape[1]]
    return values.float() * scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return ``a b^T [rows of a, rows of b]`` of two `quantised` matrices ``[.., inner]``."""
    return (dequantised(*a) @ dequantised(*b).t()).to(dtype)
