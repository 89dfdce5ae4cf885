"""The products of low-rank factors with wide matrices, where factors may be float32 and the rest bfloat16.

``x`` and ``y`` are wide, ``[tokens, width]``; a factor is ``[rank, width]``, and a product of the two is
thin, ``[tokens, rank]``. If factors have the dtype of the wide matrices, these are ordinary products.

Otherwise the wide matrices are bfloat16 and the factors float32. Upstream then converts the wide matrices and
multiplies in float32. Here a factor is split into two bfloat16 matrices, ``high + low``, which have 16 of its
24 bits, and wide matrices stay as they are. Products of bfloat16 numbers are exact in float32, in which they
are summed. So thin results and gradients of factors, which are float32, are off by 2^-17 of a factor: 256
times less than the rounding of ``x`` and ``y``. To a wide matrix, ``high high + high low + low high`` is
added in one product.
"""

from __future__ import annotations

import torch

from veomni_hook.accelerator import is_rocm

__all__ = [
    "add_product",
    "factor_gradient",
    "mixes",
    "split_factor",
    "split_thin",
    "summed",
    "thin",
    "widens",
]

Tensor = torch.Tensor

#: ``torch.mm`` with float32 results for bfloat16 operands: since torch 2.8, on NVIDIA GPUs.
_WIDENS = hasattr(torch.ops.aten.mm, "dtype") and not is_rocm()


def mixes(wide: torch.dtype, factor: torch.dtype) -> bool | None:
    """Return whether the dtypes differ in the way that is computed here; None: in another way."""
    if wide is factor:
        return False
    return True if wide is torch.bfloat16 and factor is torch.float32 else None


def widens(x: Tensor) -> bool:
    """Return whether ``x``'s device multiplies bfloat16 matrices into float32 ones."""
    return _WIDENS and x.is_cuda


def split_factor(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a factor itself if it has ``dtype``; else high, low and high again, ``[3, rank, width]``."""
    if factor.dtype is dtype:
        return factor
    parts = torch.empty((3, *factor.shape), dtype=dtype, device=factor.device)
    parts[::2].copy_(factor)
    torch.sub(factor, parts[0], out=parts[1])
    return parts


def split_thin(h: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a thin matrix itself if it has ``dtype``; else high, high and low, ``[tokens, 3 * rank]``."""
    if h.dtype is dtype:
        return h
    tokens, rank = h.shape
    parts = torch.empty((tokens, 3, rank), dtype=dtype, device=h.device)
    parts[:, :2].copy_(h.unsqueeze(1))
    torch.sub(h, parts[:, 0], out=parts[:, 2])
    return parts.view(tokens, 3 * rank)


def thin(x: Tensor, factor: Tensor, scale: float = 1.0) -> Tensor:
    """Return ``scale * x @ factor.T``, in float32 for a split factor."""
    if factor.dim() == 2:
        return _product(x, factor.t(), scale)
    rank = factor.shape[1]
    halves = _in_float32(x, factor[:2].view(2 * rank, -1).t())
    return _scaled(halves[:, :rank] + halves[:, rank:], scale)


def add_product(y: Tensor, h: Tensor, factor: Tensor, scale: float) -> Tensor:
    """Add ``scale * h @ factor`` to ``y`` in place; ``h`` and the factor are both split, or neither is."""
    return y.addmm_(h, factor if factor.dim() == 2 else factor.view(h.shape[1], -1), alpha=scale)


def summed(x: Tensor, w: Tensor, bias: Tensor | None, h: Tensor, factor: Tensor, scale: float) -> Tensor:
    """Return ``x @ w + scale * h @ factor + bias``; ``h`` and the factor are both split, or neither is."""
    y = x @ w if bias is None else torch.addmm(bias, x, w)
    return add_product(y, h, factor, scale)


def factor_gradient(h: Tensor, x: Tensor, scale: float, *, split: bool, transposed: bool = False) -> Tensor:
    """Return ``scale * h.T @ x``, ``[rank, width]``, or its transpose; in float32 if ``h`` is ``split``."""
    rank = h.shape[1] // 3
    h = h[:, rank:] if split else h
    left, right = (x, h) if transposed else (h, x)
    if not split:
        return _product(left.t(), right, scale)
    halves = _in_float32(left.t(), right)
    if transposed:
        return _scaled(halves[:, :rank] + halves[:, rank:], scale)
    return _scaled(halves[:rank] + halves[rank:], scale)


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return left @ right
    # With the scale in the product, the result is rounded once; what is in the new tensor is ignored.
    return left.new_empty((left.shape[0], right.shape[1])).addmm_(left, right, beta=0, alpha=scale)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x.mul_(scale)


def _in_float32(left: Tensor, right: Tensor) -> Tensor:
    if widens(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
