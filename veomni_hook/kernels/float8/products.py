"""The two products of a linear layer that are computed in float8.

Forward:  y = x W^T + bias, with scales of the rows of x and of the rows of W
Backward: dx = dy W, with scales of the rows of dy and of the columns of W
Shapes: x ``[..., in]``, W ``[out, in]``, dy ``[..., out]``; x and dy have one dtype, W has it or another.
On a GPU the products are ``torch._scaled_mm``, which returns bfloat16; on a CPU the definition.
"""

from __future__ import annotations

import torch

from veomni_hook.kernels.float8 import reference
from veomni_hook.kernels.float8.reference import FLOAT8
from veomni_hook.kernels.shared.operators import operator

__all__ = ["MULTIPLE", "input_gradient", "linear"]

Tensor = torch.Tensor

#: What ``torch._scaled_mm`` wants ``in`` and ``out`` to be multiples of.
MULTIPLE = 16


def _fake_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FLOAT8), x.new_empty(x.shape[0], 1, dtype=torch.float32)


@operator(_fake_rows)
def _float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from veomni_hook.kernels.float8 import triton  # may be missing where there is no GPU

        return triton.quantised(x)
    return reference.quantised(x)


def _fake_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty(columns, rows, dtype=FLOAT8), x.new_empty(columns, 1, dtype=torch.float32)


@operator(_fake_columns)
def _float8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from veomni_hook.kernels.float8 import triton

        return triton.quantised_columns(x)
    q, scale = reference.quantised(x.t())
    return q.contiguous(), scale


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + bias``, ``[..., out]`` in the dtype of ``x [..., in]``."""
    return _product(x, _float8_rows(weight), bias)


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """Return ``dy W``, ``[..., in]`` in the dtype of ``dy [..., out]``."""
    return _product(dy, _float8_columns(weight), None)


def _product(x: Tensor, matrix: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
    """Return ``x matrix^T + bias`` for ``matrix`` quantised by rows."""
    b, scale_of_b = matrix
    rows = _float8_rows(x.reshape(-1, x.shape[-1]))
    shape = (*x.shape[:-1], b.shape[0])
    bias = None if bias is None else bias.to(x.dtype)
    if not x.is_cuda:
        y = reference.product(rows, matrix, x.dtype)
        return (y if bias is None else y + bias).view(shape)
    if not x.numel():
        return x.new_empty(shape)
    within = x.dtype is torch.bfloat16  # the dtype of the result
    y = torch._scaled_mm(
        rows[0],
        b.t(),
        scale_a=rows[1],
        scale_b=scale_of_b.t(),
        bias=bias if within else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(x.dtype)
    return (y if bias is None or within else y + bias).view(shape)
