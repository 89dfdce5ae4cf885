"""Products in float8 by definition: what a CPU computes, and the oracle for the kernels.

A row x of a matrix is stored as ``q = x / s`` in float8 (e4m3: 3 bits of mantissa, at most 448), with the
scale s = 2^k, the smallest power of two for which no element of the row exceeds 448 s. So ``|s q - x|`` is at
most ``2^-4 |x|``, or ``2^-10 s`` for elements below ``2^-6 s``. A row with an infinity or a NaN has the scale
NaN, and so have all results that it is part of.
"""

from __future__ import annotations

import torch

__all__ = ["FLOAT8", "LARGEST", "LEAST", "product", "quantised", "scales"]

Tensor = torch.Tensor

FLOAT8 = torch.float8_e4m3fn
#: The largest number of the format.
LARGEST = 448.0
#: Rows without a larger element, such as zeros, have the scale of this one.
LEAST = 2.0**-100


def scales(x: Tensor) -> Tensor:
    """Return the scale of each row of ``x [rows, columns]``, float32 ``[rows, 1]``."""
    largest = x.abs().amax(1, keepdim=True).float()
    mantissa, exponent = torch.frexp(largest.clamp(min=LEAST) / LARGEST)  # mantissa in [0.5, 1)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return torch.where(largest.isfinite(), scale, torch.nan)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x [rows, columns]`` in float8, and its `scales`."""
    scale = scales(x) if x.shape[1] else x.new_ones(x.shape[0], 1, dtype=torch.float32)
    return (x.float() / scale).to(FLOAT8), scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return ``a b^T [rows of a, rows of b]`` of two `quantised` matrices ``[.., inner]``."""
    (x, scale_of_x), (w, scale_of_w) = a, b
    return (x.float() @ w.float().t() * scale_of_x * scale_of_w.t()).to(dtype)
