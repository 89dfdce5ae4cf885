"""Casts to float8 in Triton: rows in one pass, columns (which come out as rows) in two; MX in one.

Shapes: x ``[rows, columns]`` in float32, bfloat16 or float16; for scales see `reference`. Beside the
results, a number for each column is allocated. Mutates: nothing.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from veomni_hook.kernels.float8 import device
from veomni_hook.kernels.float8.reference import FLOAT8, SHARED
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power
from veomni_hook.kernels.shared.rows import dense_rows

__all__ = ["in_mx", "quantised", "quantised_columns", "turned"]

Tensor = torch.Tensor

# Elements of a row that a program holds; blocks of columns: for the maximum, of which a program reads many,
# some of them ahead (on an H200, that gains 12 to 22 %), for the cast, and for the transpose.
_WIDEST = 16384
_LOOKS, _BLOCKS, _AHEAD, _CASTS, _TURNED = (32, 64), 16, 3, (64, 128), 128
# Rows and columns of a block that becomes MX.
_MX = (64, 128)


@lru_cache(maxsize=LAUNCHES)
def _of_rows(on: torch.device, dtype: torch.dtype, columns: int, stride: int) -> Launch:
    block = min(power(columns), _WIDEST)
    return Launch(device.cast_rows, 3, columns, block, num_warps=max(1, min(8, block // 512)))


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x [rows, columns]`` in float8, and the scale of each row, ``[rows, 1]``."""
    x = dense_rows(x)
    rows, columns = x.shape
    q = torch.empty(rows, columns, dtype=FLOAT8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows and columns:
        launch = _of_rows(x.device, x.dtype, columns, x.stride(0))
        launch((rows, 1, 1), x, q, scale, rows, x.stride(0))
    return q, scale


def _kind(size: int) -> tuple[bool, bool]:
    """What Triton specialises a size on: numbers of tokens vary, and launches are kept by this alone."""
    return size == 1, size % 16 == 0


@lru_cache(maxsize=LAUNCHES)
def _of_columns(
    on: torch.device, dtype: torch.dtype, kind: tuple[bool, bool], fixed: tuple[int, ...], *, multiplied: bool
) -> tuple[Launch, Launch]:
    return (
        Launch(device.largest_of_columns, 3, *_LOOKS, _BLOCKS, _AHEAD, multiplied, num_warps=4),
        Launch(device.cast_columns, 5, *_CASTS, multiplied, num_warps=8),
    )


def quantised_columns(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the transpose of a matrix, or of several, in float8, and the scale of each of its rows.

    ``x`` is ``[..., rows, columns]``; the results are ``[..., columns, rows]`` and ``[..., columns, 1]``.
    With ``factors`` ``[rows, 1]``, float32, they are those of ``x * factors``.
    """
    x = dense_rows(x)
    rows, columns = x.shape[-2:]
    number, apart = (x.shape[0], x.stride(0)) if x.ndim == 3 else (1, 0)
    q = torch.empty(*x.shape[:-2], columns, rows, dtype=FLOAT8, device=x.device)
    scale = torch.empty(*x.shape[:-2], columns, 1, dtype=torch.float32, device=x.device)
    if q.numel():
        largest = torch.zeros(number, columns, dtype=torch.int32, device=x.device)
        sizes = columns, apart, x.stride(-2)
        look, cast = _of_columns(x.device, x.dtype, _kind(rows), sizes, multiplied=factors is not None)
        of_rows = scale if factors is None else factors
        looks = cdiv(rows, _LOOKS[0] * _BLOCKS), cdiv(columns, _LOOKS[1]), number
        look(looks, x, of_rows, largest, rows, *sizes)
        casts = cdiv(rows, _CASTS[0]), cdiv(columns, _CASTS[1]), number
        cast(casts, x, of_rows, largest, q, scale, rows, *sizes)
    return q, scale


@lru_cache(maxsize=LAUNCHES)
def _turn(on: torch.device, kind: tuple[bool, bool], columns: int) -> Launch:
    return Launch(device.turn, 2, _TURNED, _TURNED, num_warps=8)


def turned(q: Tensor) -> Tensor:
    """Return the transpose of ``q [rows, columns]``, contiguous, in float8, as a contiguous tensor."""
    rows, columns = q.shape
    y = torch.empty(columns, rows, dtype=q.dtype, device=q.device)
    if q.numel():
        grid = cdiv(rows, _TURNED), cdiv(columns, _TURNED), 1
        bytes_of_q, bytes_of_y = q.view(torch.uint8), y.view(torch.uint8)
        _turn(q.device, _kind(rows), columns)(grid, bytes_of_q, bytes_of_y, rows, columns)
    return y


@lru_cache(maxsize=LAUNCHES)
def _to_mx(
    on: torch.device, dtype: torch.dtype, kind: tuple[bool, bool], fixed: tuple[int, ...], *, turned: bool
) -> Launch:
    return Launch(device.cast_to_mx, 3, *_MX, turned, num_warps=8)


def in_mx(x: Tensor, *, turned: bool = False) -> tuple[Tensor, Tensor]:
    """Return a matrix, or several, in MX: float8, and the bytes of scales, each of 32 neighbours.

    ``x`` is ``[..., rows, columns]``; the results are that and ``[..., rows, columns / 32]``, or those of the
    ``turned`` matrices, ``[..., columns, rows]`` and ``[..., columns, rows / 32]``.
    """
    x = dense_rows(x)
    rows, columns = x.shape[-2:]
    number, apart = (x.shape[0], x.stride(0)) if x.ndim == 3 else (1, 0)
    of_rows, neighbours = (columns, rows) if turned else (rows, columns)
    q = torch.empty(*x.shape[:-2], of_rows, neighbours, dtype=FLOAT8, device=x.device)
    scale = torch.empty(*x.shape[:-2], of_rows, cdiv(neighbours, SHARED), dtype=torch.uint8, device=x.device)
    if q.numel():
        sizes = columns, apart, x.stride(-2)
        launch = _to_mx(x.device, x.dtype, _kind(rows), sizes, turned=turned)
        launch((cdiv(rows, _MX[0]), cdiv(columns, _MX[1]), number), x, q, scale, rows, *sizes)
    return q, scale
