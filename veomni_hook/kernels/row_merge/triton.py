"""Rows merged or added in Triton: a cumulative sum of the mask, and one launch in each direction.

`veomni_hook.kernels.row_merge.device` has the formulas. Forward reads and writes every row once. Added rows
have the incoming gradient itself as that of the hidden states.

Shapes: inputs [..., H], mask of rows, source of whole rows, in float32, bfloat16 or float16, one dtype.
Saved: the count of the mask's rows up to each row, int32 [rows]. Mutates: nothing. Deterministic. No value
is read on the host: the number of rows is asserted on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from veomni_hook.kernels.row_merge import device as kernels
from veomni_hook.kernels.row_merge import torch as in_torch
from veomni_hook.kernels.row_merge.rules import add_rows, merge_rows
from veomni_hook.kernels.row_merge.torch import check
from veomni_hook.kernels.shared.autograd import differentiable, is_recorded
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power
from veomni_hook.kernels.shared.operand_checks import DTYPES
from veomni_hook.kernels.shared.operators import operator

__all__ = ["refuses", "rows", "rows_added"]

Tensor = torch.Tensor
# Columns per program.
_TILE = 4096


# Cached by all Triton specialisations except the numbers of rows.
@lru_cache(maxsize=LAUNCHES)
def _launch(name: str, device: torch.device, dtype: torch.dtype, columns: int, *flags: bool) -> Launch:
    """Return how to launch the kernel ``name``; ``flags`` are its last constants."""
    block = min(power(columns), _TILE)
    warps = max(1, min(8, block // 512))
    return Launch(getattr(kernels, name), 4, columns, block, *flags, num_warps=warps)


def _grid(rows: int, columns: int) -> tuple[int, int, int]:
    return rows, cdiv(columns, min(power(columns), _TILE)), 1


@operator(
    lambda x, source, mask, *others: (x.new_empty(x.shape), mask.new_empty(mask.shape, dtype=torch.int32))
)
def _row_merge(
    x: Tensor, source: Tensor, mask: Tensor, source_rows: int | torch.SymInt, added: bool
) -> tuple[Tensor, Tensor]:
    counts = mask.cumsum(0, dtype=torch.int32)
    check(counts[-1], source.shape[0], added=added)
    x, source = x.contiguous(), source.contiguous()
    rows, columns = x.shape
    y = torch.empty_like(x)
    launch = _launch("forward", x.device, x.dtype, columns, added)
    launch(_grid(rows, columns), x, source, counts, y, source_rows)
    return y, counts


@operator(
    lambda dy, counts, source_rows, to_x, to_source: (
        dy.new_empty(dy.shape if to_x else 0),
        dy.new_empty((source_rows, dy.shape[1]) if to_source else 0),
    )
)
def _row_merge_backward(
    dy: Tensor,
    counts: Tensor,
    source_rows: int | torch.SymInt,
    to_x: bool,
    to_source: bool,
) -> tuple[Tensor, Tensor]:
    dy = dy.contiguous()
    rows, columns = dy.shape
    dx = torch.empty_like(dy) if to_x else dy.new_empty(0)
    dsource = dy.new_empty((source_rows, columns) if to_source else 0)
    launch = _launch("backward", dy.device, dy.dtype, columns, to_x, to_source)
    most = max(rows, source_rows) if to_source else rows
    launch(_grid(int(most), columns), dy, counts, dx, dsource, rows, source_rows)
    return dx, dsource


def _gradients(
    saved: Sequence[Any], rest: tuple[int, bool], wanted: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    counts, (source_rows, added) = saved[-1], rest
    to_x, to_source, _ = wanted
    if is_recorded():
        mask = counts.diff(prepend=counts.new_zeros(1)) > 0
        return in_torch.gradients((mask, counts.long()), rest, wanted, dy)
    kept = to_x and not added
    if not (kept or to_source):
        return dy, None, None
    dx, dsource = _row_merge_backward(dy, counts, source_rows, kept, to_source)
    return dx if kept else dy, dsource, None


_apply: Callable[..., Tensor] = differentiable(_row_merge, _gradients, None, tensors=3, unread=3)


rows, rows_added = partial(merge_rows, _apply), partial(add_rows, _apply)


def refuses(owner: object, inputs: Tensor, *others: Any) -> str | None:
    """Return what the kernels refuse, beside `rules`, or None."""
    return None if inputs.dtype in DTYPES else f"the kernel does not support {inputs.dtype}"
