"""The products of a linear layer in float8.

Forward:  y = x W^T + bias, with scales of the rows of x and of the rows of W
Backward: dx = dy W, with scales of the rows of dy and of the columns of W
          dW = q^T (s x), where the rows of dy are s q, as for dx, with scales of the columns of s x
In MX, scales are those of 32 neighbours along the sum, and dW = dy^T x has both factors cast anew.
Shapes: x ``[..., in]``, W ``[out, in]``, dy ``[..., out]``; x and dy have one dtype, W has it or another.
On a GPU the products are ``torch._scaled_mm``, which returns bfloat16; on a CPU the definition.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional

from veomni_hook.accelerator import is_rocm
from veomni_hook.errors import KernelError
from veomni_hook.kernels.float8 import reference
from veomni_hook.kernels.float8.reference import FLOAT8, SHARED
from veomni_hook.kernels.gated_mlp.recomputed import Gradients
from veomni_hook.kernels.shared.operators import operator
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing

__all__ = ["check_device", "gradients", "linear", "widths_refused"]

Tensor = torch.Tensor

#: What ``torch._scaled_mm`` wants ``in`` and ``out`` to be multiples of.
_MULTIPLE = 16
_BLACKWELL = "use a GPU with MX (NVIDIA, compute capability 10.0 or higher: Blackwell), or precision=float8"
_HOPPER = "use a GPU with float8 (NVIDIA, compute capability 8.9 or higher: Ada, Hopper, Blackwell)"


@operator(
    lambda x: (x.new_empty(x.shape, dtype=FLOAT8), x.new_empty(x.shape[0], 1, dtype=torch.float32)),
)
def _float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from veomni_hook.kernels.float8 import triton  # may be missing where there is no GPU

        return triton.quantised(x)
    return reference.quantised(x)


@operator(
    lambda x, factors: (
        x.new_empty(x.shape[::-1], dtype=FLOAT8),
        x.new_empty(x.shape[1], 1, dtype=torch.float32),
    )
)
def _float8_columns(x: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from veomni_hook.kernels.float8 import triton

        return triton.quantised_columns(x, factors)
    q, scale = reference.quantised((x if factors is None else x.float() * factors).t())
    return q.contiguous(), scale


def _fake_mx(x: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape[::-1] if turned else x.shape
    scale = x.new_empty(rows, -(-columns // SHARED), dtype=torch.uint8)
    return x.new_empty(rows, columns, dtype=FLOAT8), scale


@operator(_fake_mx)
def _float8_mx(x: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from veomni_hook.kernels.float8 import triton

        return triton.in_mx(x, turned=turned)
    q, scale = reference.quantised(x.t() if turned else x, mx=True)
    return q.contiguous(), scale


@operator(lambda q: q.new_empty(q.shape[::-1]))
def _float8_turned(q: Tensor) -> Tensor:
    if q.is_cuda:
        from veomni_hook.kernels.float8 import triton

        return triton.turned(q)
    return q.t().contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, mx: bool = False) -> Tensor:
    """Return ``x W^T + bias``, ``[..., out]`` in the dtype of ``x [..., in]``."""
    return _product(x, _rows(x.reshape(-1, x.shape[-1]), mx=mx), _rows(weight, mx=mx), bias)


def gradients(dy: Tensor, *, mx: bool = False) -> Gradients:
    """Return the products of ``dy [..., out]``, in its dtype; it is cast once for both, unless it is MX.

    ``of_input(weight)`` is ``dy W``, ``[..., in]``; ``of_weight(x)`` is ``dy^T x``, ``[out, in]``, for
    ``x [..., in]``. ``torch._scaled_mm`` wants a `_multiple` for the number of rows of the second, too;
    others are not cast.
    """
    flat = dy.reshape(-1, dy.shape[-1])
    q, scale = _rows(flat, mx=mx)

    def of_input(weight: Tensor) -> Tensor:
        columns = _float8_mx(weight, True) if mx else _float8_columns(weight, None)
        return _product(dy, (q, scale), columns, None)

    def of_weight(x: Tensor) -> Tensor:
        x = x.reshape(-1, x.shape[-1])
        if x.shape[0] % _multiple(mx=mx) or not x.numel():
            return flat.t() @ x
        if mx:
            return _multiplied(_float8_mx(flat, True), _float8_mx(x, True), None, x.dtype)
        ones = scale.new_ones(flat.shape[1], 1)
        return _multiplied((_float8_turned(q), ones), _float8_columns(x, scale), None, x.dtype)

    return Gradients(of_input, of_weight)


def _rows(x: Tensor, *, mx: bool) -> tuple[Tensor, Tensor]:
    return _float8_mx(x, False) if mx else _float8_rows(x)


def _product(
    x: Tensor, rows: tuple[Tensor, Tensor], matrix: tuple[Tensor, Tensor], bias: Tensor | None
) -> Tensor:
    """Return ``x matrix^T + bias`` for ``x``, whose ``rows`` are quantised, and ``matrix`` as well."""
    shape = (*x.shape[:-1], matrix[0].shape[0])
    return x.new_empty(shape) if not x.numel() else _multiplied(rows, matrix, bias, x.dtype).view(shape)


def _multiplied(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``a b^T + bias`` for matrices quantised by rows."""
    bias = None if bias is None else bias.to(dtype)
    if not a[0].is_cuda:
        y = reference.product(a, b, dtype)
        return y if bias is None else y + bias
    mx = a[1].dtype is torch.uint8
    within = dtype is torch.bfloat16 and not mx  # the dtype of the result
    y = torch._scaled_mm(
        a[0],
        b[0].t(),
        scale_a=_tiled(a[1]) if mx else a[1],
        scale_b=_tiled(b[1]) if mx else b[1].t(),
        bias=bias if within else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=not mx,
    ).to(dtype)
    return y if bias is None or within else y + bias


def _tiled(scale: Tensor) -> Tensor:
    """Return the bytes of scales of MX in the order that cuBLAS wants.

    By its documentation (1D block scaling factors): padded tiles of 128 rows and 4 columns, one row of them
    after the other; in a tile, row 32 a + b and column c are at 16 b + 4 a + c.
    """
    rows, columns = scale.shape
    padded = functional.pad(scale, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


def _multiple(*, mx: bool = False) -> int:
    """Return what the sizes that are summed over have to be multiples of."""
    return SHARED if mx else _MULTIPLE


def widths_refused(weight: Any, *, mx: bool = False) -> str | None:
    """Return why a weight, or stacked weights, of this shape are not multiplied in float8, or None."""
    out, width = weight.shape[-2:]
    if out % _multiple(mx=mx) or width % _multiple(mx=mx):
        return f"its weight is {out} x {width}, which are no multiples of {_multiple(mx=mx)}"
    return None


def check_device(x: Tensor, *, mx: bool = False) -> None:
    """Raise KernelError if the device of ``x`` cannot multiply in float8; a CPU computes the definition."""
    kind = x.device.type
    if kind != "cpu" and (lacks := _lacks(kind, x.get_device(), mx=mx)):
        where, fix = ("mxfp8", _BLACKWELL) if mx else ("float8", f"{_HOPPER}, or leave the setting out")
        raise KernelError(f"{lacks} has no {where} products", where=f"precision={where}", fix=fix)


@answered_while_tracing
@cache
def _lacks(kind: str, index: int, *, mx: bool) -> str:
    """Return the name of a device that cannot multiply in float8; empty: it can."""
    if kind != "cuda" or is_rocm():
        return f"this device ({kind}{', ROCm' if kind == 'cuda' else ''})"
    if find_spec("triton") is None:
        return "this machine, where Triton is not installed,"
    major, minor = torch.cuda.get_device_capability(index)
    least = (10, 0) if mx else (8, 9)
    return "" if (major, minor) >= least else f"{torch.cuda.get_device_name(index)} ({major}.{minor})"
