"""The products of a linear layer in float8.

Forward:  y = x W^T + bias, with scales of the rows of x and of the rows of W
Backward: dx = dy W, with scales of the rows of dy and of the columns of W
          dW = q^T (s x), where the rows of dy are s q, as for dx, with scales of the columns of s x
Shapes: x ``[..., in]``, W ``[out, in]``, dy ``[..., out]``; x and dy have one dtype, W has it or another.
On a GPU the products are ``torch._scaled_mm``, which returns bfloat16; on a CPU the definition.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from veomni_hook.accelerator import is_rocm
from veomni_hook.errors import KernelError
from veomni_hook.kernels.float8 import reference
from veomni_hook.kernels.float8.reference import FLOAT8
from veomni_hook.kernels.gated_mlp.recomputed import Gradients
from veomni_hook.kernels.shared.operators import operator

__all__ = ["MULTIPLE", "check_device", "gradients", "linear", "widths_refused"]

Tensor = torch.Tensor

#: What ``torch._scaled_mm`` wants ``in`` and ``out`` to be multiples of.
MULTIPLE = 16
_HOPPER = "use a GPU with float8 (NVIDIA, compute capability 8.9 or higher: Ada, Hopper, Blackwell)"


def _fake_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FLOAT8), x.new_empty(x.shape[0], 1, dtype=torch.float32)


@operator(_fake_rows)
def _float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from veomni_hook.kernels.float8 import triton  # may be missing where there is no GPU

        return triton.quantised(x)
    return reference.quantised(x)


def _fake_columns(x: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty(columns, rows, dtype=FLOAT8), x.new_empty(columns, 1, dtype=torch.float32)


@operator(_fake_columns)
def _float8_columns(x: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from veomni_hook.kernels.float8 import triton

        return triton.quantised_columns(x, factors)
    q, scale = reference.quantised((x if factors is None else x.float() * factors).t())
    return q.contiguous(), scale


def _fake_turned(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[::-1])


@operator(_fake_turned)
def _float8_turned(q: Tensor) -> Tensor:
    if q.is_cuda:
        from veomni_hook.kernels.float8 import triton

        return triton.turned(q)
    return q.t().contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + bias``, ``[..., out]`` in the dtype of ``x [..., in]``."""
    return _product(x, _float8_rows(x.reshape(-1, x.shape[-1])), _float8_rows(weight), bias)


def gradients(dy: Tensor) -> Gradients:
    """Return the products of ``dy [..., out]``, which is cast once for both, in its dtype.

    ``of_input(weight)`` is ``dy W``, ``[..., in]``; ``of_weight(x)`` is ``dy^T x``, ``[out, in]``, for
    ``x [..., in]``. ``torch._scaled_mm`` wants a multiple of `MULTIPLE` for the number of rows of the second,
    too; others are not cast.
    """
    flat = dy.reshape(-1, dy.shape[-1])
    q, scale = _float8_rows(flat)

    def of_input(weight: Tensor) -> Tensor:
        return _product(dy, (q, scale), _float8_columns(weight, None), None)

    def of_weight(x: Tensor) -> Tensor:
        x = x.reshape(-1, x.shape[-1])
        if x.shape[0] % MULTIPLE or not x.numel():
            return flat.t() @ x
        ones = scale.new_ones(flat.shape[1], 1)
        return _multiplied((_float8_turned(q), ones), _float8_columns(x, scale), None, x.dtype)

    return Gradients(of_input, of_weight)


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
    within = dtype is torch.bfloat16  # the dtype of the result
    y = torch._scaled_mm(
        a[0],
        b[0].t(),
        scale_a=a[1],
        scale_b=b[1].t(),
        bias=bias if within else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(dtype)
    return y if bias is None or within else y + bias


def widths_refused(weight: Any) -> str | None:
    """Return why a weight, or stacked weights, of this shape are not multiplied in float8, or None."""
    out, width = weight.shape[-2:]
    if out % MULTIPLE or width % MULTIPLE:
        return f"its weight is {out} x {width}, which are no multiples of {MULTIPLE}"
    return None


def check_device(x: Tensor) -> None:
    """Raise KernelError if the device of ``x`` cannot multiply in float8; a CPU computes the definition."""
    kind = x.device.type
    if kind != "cpu" and (lacks := _lacks(kind, x.get_device())):
        fix = f"{_HOPPER}, or leave the setting out"
        raise KernelError(f"{lacks} has no float8 products", where="precision=float8", fix=fix)


@cache
def _lacks(kind: str, index: int) -> str:
    """Return the name of a device that cannot multiply in float8; empty: it can."""
    if kind != "cuda" or is_rocm():
        return f"this device ({kind}{', ROCm' if kind == 'cuda' else ''})"
    if find_spec("triton") is None:
        return "this machine, where Triton is not installed,"
    major, minor = torch.cuda.get_device_capability(index)
    return "" if (major, minor) >= (8, 9) else f"{torch.cuda.get_device_name(index)} ({major}.{minor})"


# Same as torch.compiler.assume_constant_result, which imports dynamo.
setattr(_lacks, "_dynamo_marked_constant", True)  # noqa: B010 - mypy knows no such attribute
