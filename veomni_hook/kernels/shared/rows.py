"""A tensor viewed as rows that a kernel can address without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Rows", "contiguous_strides", "dense_rows", "readable", "rows_at", "rows_of"]


class Rows(NamedTuple):
    """The rows of a tensor: row ``r`` begins at ``r // (n1 * n2) * s0 + r // n2 % n1 * s1 + r % n2 * s2``."""

    n1: int
    n2: int
    s0: int
    s1: int
    s2: int


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, as torch computes them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def rows_of(x: torch.Tensor) -> Rows | None:
    """Return where the rows ``[..., columns]`` begin; None if this takes more than three strides."""
    if x.is_contiguous() and x.ndim:
        # The common case, found faster. A single row gets the strides of many, so the same code is compiled.
        return Rows(1, 1, x.shape[-1], 0, 0)
    return rows_at(x.shape, x.stride())


def rows_at(shape: Sequence[int], strides: Sequence[int]) -> Rows | None:
    """`rows_of` a tensor of this shape and these strides."""
    if _is_contiguous(shape, strides):
        return Rows(1, 1, shape[-1], 0, 0)
    if strides[-1] != 1 and shape[-1] > 1:
        return None
    steps: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if steps and steps[-1][1] == size * stride:
            steps[-1] = steps[-1][0] * size, stride
        else:
            steps.append((size, stride))
    if len(steps) > 3:
        return None
    # A single step is the first one: a division by 1 costs nothing, because triton removes it.
    (_, s0), *others = steps or [(1, 0)]
    (n1, s1), (n2, s2) = [(1, 0)] * (2 - len(others)) + others
    return Rows(n1, n2, s0, s1, s2)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return what `torch.Tensor.is_contiguous` does: strides of single values do not matter."""
    if 0 in shape:
        return True
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return bool(shape)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a contiguous copy if the elements of a row are no neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


def readable(x: torch.Tensor) -> tuple[torch.Tensor, Rows]:
    """Return ``x``, or a contiguous copy if its strides do not fit in `Rows`, and where its rows begin."""
    rows = rows_of(x)
    if rows is None:
        x = x.contiguous()
        rows = rows_of(x)
    assert rows is not None  # noqa: S101
    return x, rows
