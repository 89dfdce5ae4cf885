"""Casts to float8 in Triton: rows in one pass, columns (which come out as rows) in two.

Shapes: x ``[rows, columns]`` in float32, bfloat16 or float16; for scales see `reference`. Beside the
results, a number for each column is allocated. Mutates: nothing.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from veomni_hook.kernels.float8 import device
from veomni_hook.kernels.float8.reference import FLOAT8
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power

__all__ = ["quantised", "quantised_columns"]

Tensor = torch.Tensor

# Elements of a row that a program holds; a block of columns, and how many a program reads for the maximum.
_WIDEST = 16384
_ROWS, _COLUMNS, _BLOCKS = 64, 128, 8


def _readable(x: Tensor) -> Tensor:
    """Return ``x`` with columns that are neighbours."""
    return x if x.stride(1) == 1 else x.contiguous()


@lru_cache(maxsize=LAUNCHES)
def _of_rows(on: torch.device, dtype: torch.dtype, columns: int, stride: int) -> Launch:
    block = min(power(columns), _WIDEST)
    return Launch(device.cast_rows, 3, columns, block, num_warps=max(1, min(8, block // 512)))


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x [rows, columns]`` in float8, and the scale of each row, ``[rows, 1]``."""
    x = _readable(x)
    rows, columns = x.shape
    q = torch.empty(rows, columns, dtype=FLOAT8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows and columns:
        launch = _of_rows(x.device, x.dtype, columns, x.stride(0))
        launch((rows, 1, 1), x, q, scale, rows, x.stride(0))
    return q, scale


@lru_cache(maxsize=LAUNCHES)
def _of_columns(
    on: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> tuple[Launch, tuple[int, int, int], Launch, tuple[int, int, int]]:
    rows, columns, _ = sizes
    across = cdiv(columns, _COLUMNS)
    return (
        Launch(device.largest_of_columns, 2, _ROWS, _COLUMNS, _BLOCKS, num_warps=8),
        (cdiv(rows, _ROWS * _BLOCKS), across, 1),
        Launch(device.cast_columns, 4, _ROWS, _COLUMNS, num_warps=8),
        (cdiv(rows, _ROWS), across, 1),
    )


def quantised_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``quantised(x.t())``, ``[columns, rows]`` and ``[columns, 1]``, from ``x [rows, columns]``."""
    x = _readable(x)
    rows, columns = x.shape
    q = torch.empty(columns, rows, dtype=FLOAT8, device=x.device)
    scale = torch.empty(columns, 1, dtype=torch.float32, device=x.device)
    if rows and columns:
        largest = torch.zeros(columns, dtype=torch.int32, device=x.device)
        sizes = rows, columns, x.stride(0)
        look, look_grid, cast, cast_grid = _of_columns(x.device, x.dtype, sizes)
        look(look_grid, x, largest, *sizes)
        cast(cast_grid, x, largest, q, scale, *sizes)
    return q, scale
