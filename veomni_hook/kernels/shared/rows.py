"""A tensor viewed as rows that a kernel can address without a copy."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Rows", "readable", "rows_of"]


class Rows(NamedTuple):
    """The rows of a tensor: row ``r`` begins at ``r // (n1 * n2) * s0 + r // n2 % n1 * s1 + r % n2 * s2``."""

    n1: int
    n2: int
    s0: int
    s1: int
    s2: int


def rows_of(x: torch.Tensor) -> Rows | None:
    """Return where the rows ``[..., columns]`` begin; None if this takes more than three strides."""
    if x.is_contiguous() and x.ndim:
        # The common case, found faster. A single row gets the strides of many, so the same code is compiled.
        return Rows(1, 1, x.shape[-1], 0, 0)
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    steps: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
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


def readable(x: torch.Tensor) -> tuple[torch.Tensor, Rows]:
    """Return ``x``, or a contiguous copy if its strides do not fit in `Rows`, and where its rows begin."""
    rows = rows_of(x)
    if rows is None:
        x = x.contiguous()
        rows = rows_of(x)
    assert rows is not None  # noqa: S101
    return x, rows
