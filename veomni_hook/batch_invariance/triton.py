"""A matrix product in Triton; a row's bits do not depend on the other rows, their number or its position.

Sums are in float32. The sum of one number goes through the inner dimension in order, in pieces of the
hardware's instructions, whatever tile it is in. So fewer rows may have smaller tiles; `tests` compare their
bits on the GPU at hand.
"""

from __future__ import annotations

import torch

from veomni_hook.batch_invariance import device
from veomni_hook.kernels.moe_experts.triton_tiles import Tile, describable, described
from veomni_hook.kernels.shared.launch import cdiv, room

__all__ = ["product", "tile"]

#: Up to here, rows are few: what counts is how many bytes of ``b`` are in flight.
_FEW = 64
_NARROW = 8192
_ROOMY = 200 * 1024


def tile(dtype: torch.dtype, rows: int, columns: int, memory: int) -> Tile:
    """Return the tile for a product of so many rows and columns, with ``memory`` bytes to stage operands."""
    if dtype.itemsize == 4:
        return Tile(32, 32, 32, 4, 2)
    if rows <= _FEW:
        # At least 64 rows: Hopper's instructions for 64 rows add otherwise than those for fewer.
        columns_at_once = 32 if columns <= _NARROW else 64
        return Tile(64, columns_at_once, 128, 4, 4 if memory >= _ROOMY else 2)
    if memory < _ROOMY:
        return Tile(128, 128, 32, 8, 3)
    return Tile(128, 256, 64, 8, 3, flatten=True)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    """Return ``alpha * a @ b + beta * bias``, contiguous, in the dtype of the operands.

    ``a`` is ``[batch, rows, inner]`` and ``b`` ``[batch, inner, columns]``, both in 16 bits or float32, with
    any strides; ``bias`` can be expanded to the result. Nothing is mutated; there is no gradient.
    """
    batch, rows, inner, columns = *a.shape, b.shape[2]
    c = a.new_empty(batch, rows, columns)
    if not c.numel():
        return c
    many, memory = room(a.device)
    chosen = tile(a.dtype, rows, columns, memory)
    left, turned_a = _operand(a, chosen, chosen.rows, chosen.depth)
    right, turned_b = _operand(b, chosen, chosen.depth, chosen.columns)
    term = c if bias is None else bias.expand(c.shape)
    tiles = cdiv(rows, chosen.rows) * cdiv(columns, chosen.columns)
    device.product[(min(tiles, many) if chosen.flatten else tiles, batch)](
        left, right, c, term, rows, columns, inner, *a.stride(), *b.stride(), *term.stride(),
        float(alpha), float(beta),
        A_DESCRIBED=left is not a, A_TURNED=turned_a, B_DESCRIBED=right is not b, B_TURNED=turned_b,
        BIASED=bias is not None and beta != 0,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        ROWS=chosen.rows, COLUMNS=chosen.columns, DEPTH=chosen.depth, GROUP=chosen.group,
        STAGES=chosen.stages, FLATTEN=chosen.flatten, num_warps=chosen.warps,
    )  # fmt: skip
    return c


def _operand(x: torch.Tensor, chosen: Tile, high: int, wide: int) -> tuple[object, bool]:
    """Return what the kernel reads of ``[batch, a, b]`` in parts of ``high`` by ``wide``; is it turned?

    Hardware copies the tiles of one matrix of 16-bit numbers whose rows, or columns, are contiguous.
    """
    if len(x) != 1 or x.dtype.itemsize != 2 or not x.is_cuda:
        return x, False
    turned = x.stride(2) != 1
    matrix = x[0].t() if turned else x[0]
    if not describable(matrix, chosen):
        return x, False
    return described(matrix, [wide, high] if turned else [high, wide]), turned
