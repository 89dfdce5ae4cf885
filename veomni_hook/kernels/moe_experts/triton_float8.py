"""Experts' products in float8: casts of operands, and the gradients of weights.

Scales are those of `veomni_hook.kernels.float8.reference`. Gradients of weights sum over rows, and so a row's
scale cannot be taken out of the sum: ``dU_e = (s dz)' q`` for rows ``x = s q``, where ``s dz`` is cast with a
scale for each of its columns, of one expert. Mutates: nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from veomni_hook.kernels.float8.reference import FLOAT8
from veomni_hook.kernels.float8.triton import quantised, quantised_columns
from veomni_hook.kernels.moe_experts import float8_gradient_device as device
from veomni_hook.kernels.moe_experts.forms import Form
from veomni_hook.kernels.moe_experts.triton_products import Scales
from veomni_hook.kernels.moe_experts.triton_routing import Routing
from veomni_hook.kernels.moe_experts.triton_tiles import (
    Tile,
    describable,
    described,
    float8_weight_tile,
    grid,
)
from veomni_hook.kernels.shared.launch import cdiv

__all__ = ["BLOCK", "operands_of", "weight_gradient"]

Tensor = torch.Tensor

#: Rows of a tile. On a GPU, experts have more (`veomni_hook.kernels.moe_experts.float8.ROWS`).
BLOCK = 128
_COLUMNS = 64


def operands_of(
    x: Tensor, weight: Tensor, form: Form, *, transposed: bool
) -> tuple[Tensor, Tensor, bool, Scales | None]:
    """Return what a product of ``form`` multiplies, whether its weight is transposed, and the scales.

    Args:
        x: [rows, inner], in the dtype of ``form``.
        weight: [E, columns, inner], or [E, inner, columns] if ``transposed``, of any float dtype.
        form: with ``float8``, rows of both are cast, and the weight is not transposed afterwards: Hopper
            multiplies float8 along neighbours alone.
        transposed: see ``weight``.
    """
    if not form.float8:
        return x, weight.to(form.dtype), transposed, None
    values, of_rows = quantised(x)
    if transposed:
        matrices, of_columns = quantised_columns(weight)
    else:
        flat, of_columns = quantised(weight.reshape(-1, weight.shape[2]))
        matrices = flat.view(weight.shape)
    columns = of_columns.view(matrices.shape[:2])
    return values, matrices, False, Scales(of_rows.view(-1), columns, form.dtype)


def weight_gradient(
    left: Tensor,
    right: Tensor,
    routing: Routing,
    *,
    gathered: tuple[bool, bool],
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """Return what `triton_products.weight_gradient` does, from products in float8.

    One of the factors is ``gathered``: it has one row per token.
    """
    tile = tile or float8_weight_tile(left)
    p, q = left.shape[1], right.shape[1]
    out = torch.empty(routing.num_experts, p, q, dtype=dtype, device=left.device)
    if out.numel() == 0:
        return out
    if routing.num_rows == 0:
        return out.zero_()
    rows, wide = (left, right) if gathered[0] else (right, left)
    of_tokens, factors = quantised(rows)
    copied, _ = _turned(of_tokens, factors, routing, gather=True)
    cast, scale = _turned(wide, factors, routing, gather=False)
    operands: list[Any] = [copied, cast] if gathered[0] else [cast, copied]
    blocks = (tile.rows, tile.columns)
    as_descriptors = all(describable(operand, tile) for operand in operands)
    if as_descriptors:
        operands = [
            described(operand, [block, tile.depth]) for operand, block in zip(operands, blocks, strict=True)
        ]
    tiles = routing.num_experts * cdiv(p, tile.rows) * cdiv(q, tile.columns)
    device.weight_gradient[grid(left, tile, tiles)](
        *operands, scale, out, routing.experts, routing.max_tiles, routing.num_experts, p, q,
        routing.block, *blocks, tile.depth, tile.group, tile.stages,
        not gathered[0], as_descriptors, tile.flatten, num_warps=tile.warps,
    )  # fmt: skip
    return out


def _turned(x: Tensor, factors: Tensor, routing: Routing, *, gather: bool) -> tuple[Tensor, Tensor]:
    """Return rows as columns [columns, W] in float8, and the scales [E, columns] unless ``gather``."""
    columns = x.shape[1]
    width = routing.max_tiles * routing.block
    q = torch.empty(columns, width, dtype=FLOAT8, device=x.device)
    programs = (routing.max_tiles, cdiv(columns, _COLUMNS))
    sizes = routing.max_tiles, columns, x.stride(0), routing.block, _COLUMNS
    tables = factors, routing.tokens, routing.tiles
    if gather:
        as_bytes = q.view(torch.uint8)
        device.turned[programs](x.view(torch.uint8), *tables, as_bytes, as_bytes, factors, *sizes, gather)
        return q, factors
    # Zeros: of experts without rows, nothing is written.
    largest = torch.zeros(routing.num_experts, columns, dtype=torch.int32, device=x.device)
    scale = torch.zeros(routing.num_experts, columns, dtype=torch.float32, device=x.device)
    device.largest_of_experts[programs](x, *tables, largest, *sizes)
    device.turned[programs](x, *tables, largest, q, scale, *sizes, gather)
    return q, scale
