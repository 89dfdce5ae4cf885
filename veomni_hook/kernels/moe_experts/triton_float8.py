"""Experts' products in float8: casts of operands, the gradients of gate and up, and those of weights.

Scales are those of `veomni_hook.kernels.float8.reference`. Gradients of weights sum over rows, and so a row's
scale cannot be taken out of the sum: ``dU_e = (s dz)' q`` for rows ``x = s q``, where ``s dz`` is cast with a
scale for each of its columns, of one expert. In MX, where 32 neighbours along a sum share a scale, factors
are cast by themselves, and gradients of gate and up are those of `triton_products`. Mutates: `gate_gradients`
its ``products`` on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from veomni_hook.kernels.float8.reference import FLOAT8, SHARED
from veomni_hook.kernels.float8.triton import in_mx, quantised, quantised_columns
from veomni_hook.kernels.moe_experts import float8_gate_device as gate_device
from veomni_hook.kernels.moe_experts import float8_gradient_device as device
from veomni_hook.kernels.moe_experts import triton_products, triton_sums
from veomni_hook.kernels.moe_experts.forms import Form
from veomni_hook.kernels.moe_experts.operators import Needed
from veomni_hook.kernels.moe_experts.triton_products import Expert, Low, Scales
from veomni_hook.kernels.moe_experts.triton_routing import Routing
from veomni_hook.kernels.moe_experts.triton_tiles import (
    describable,
    described,
    float8_weight_tile,
    grid,
)
from veomni_hook.kernels.shared.launch import cdiv

__all__ = ["BLOCK", "Cast", "cast_rows", "gate_gradients", "input_gradient", "operands_of", "weight_gradient"]

Tensor = torch.Tensor

#: Rows of a tile. On a GPU, experts have more (`veomni_hook.kernels.moe_experts.float8.ROWS`).
BLOCK = 128
_COLUMNS, _MX_COLUMNS = 128, 64
#: Tiles of rows that share columns, and warps.
_GROUP, _WARPS = 8, 4
#: Of the gradients of gate and up: columns of a tile, tiles of rows whose largest numbers a program finds,
#: rows at a time, and how many of these are on their way. On an H200, 32 rows of 64 columns took a third more
#: time, one stage an eighth.
_GATES, _SPAN, _ROWS, _STAGES = 128, 8, 8, 3
#: Columns of a tile that is cast.
_CAST = 64
#: A multiple of all tiles' columns in products of parts.
_TILE = 256


class Cast(NamedTuple):
    """A matrix in float8: ``values`` times a ``scale`` of each row, or of each of an expert's columns.

    Attributes:
        values: [rows, columns], or [columns, bytes] as `float8_gradient_device` has columns.
        scale: float32, [rows, 1], or [E, columns]; in MX bytes, of 32 neighbours each.
    """

    values: Tensor
    scale: Tensor


def cast_rows(x: Tensor) -> Cast:
    """Return ``x`` [rows, columns] in float8, with scales of rows."""
    return Cast(*quantised(x))


def operands_of(
    x: Tensor | Cast, weight: Tensor, form: Form, *, transposed: bool
) -> tuple[Tensor, Tensor, bool, Scales | None]:
    """Return what a product of ``form`` multiplies, whether its weight is transposed, and the scales.

    Args:
        x: [rows, inner], in the dtype of ``form``, or cast.
        weight: [E, columns, inner], or [E, inner, columns] if ``transposed``, of any float dtype.
        form: with ``float8``, rows of both are cast, and the weight is not transposed afterwards: Hopper
            multiplies float8 along neighbours alone.
        transposed: see ``weight``.
    """
    if isinstance(x, Tensor) and not form.float8:
        return x, weight.to(form.dtype), transposed, None
    if isinstance(x, Tensor) and form.mx:
        values, of_rows = in_mx(x)
        matrices, of_columns = in_mx(weight, turned=transposed)
        return values, matrices, False, Scales(of_rows, of_columns, form.dtype)
    values, of_rows = cast_rows(x) if isinstance(x, Tensor) else x
    if transposed:
        matrices, of_columns = quantised_columns(weight)
    else:
        flat, of_columns = quantised(weight.reshape(-1, weight.shape[2]))
        matrices = flat.view(weight.shape)
    columns = of_columns.view(matrices.shape[:2])
    return values, matrices, False, Scales(of_rows.view(-1), columns, form.dtype)


def gate_gradients(
    grad: Cast,
    x: Cast,
    down: Tensor,
    products: Tensor,
    routing: Routing,
    weights: Tensor,
    expert: Expert,
    form: Form,
    needed: Needed,
    *,
    spend: bool,
    keep: bool = True,
    low: Low | None = None,
) -> tuple[Cast | None, Cast | None, Cast | None, Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of gate and up, and the routing weight times h, as the next products want them.

    Args:
        grad: the result's gradient, [tokens, H].
        x: [tokens, H].
        down: the second product's weight, as stored.
        products: [rows, W], kept by `triton_products.gate_up`.
        routing: the call's routing.
        weights: the routing weights [tokens, top_k].
        expert: as in the forward.
        form: likewise.
        needed: which gradients will be computed.
        spend: overwrite gate and up in ``products`` with their gradients.
        keep: return the last two results; without, and with ``spend``, ``products`` gives its memory back
            (whoever has saved the tensor finds it without data).
        low: added to the gradient of h.

    Returns:
        Those that are needed: the gradients, for the gradient of x; their columns times the scales of x, for
        the gradient of the first weight; the columns of the weighted h times the scales of ``grad``, for that
        of the second. Then the sums for `triton_sums.routing_gradient`, and the gradients [rows, W] and the
        weighted h [rows, I], or None.
    """
    dout, matrix, _, scales = operands_of(grad, down, form, transposed=not expert.transposed)
    dh = triton_products.rows_product(dout, matrix, routing, low=low, scales=scales, gathered=True)
    del matrix, scales
    (rows, width), columns, experts = products.shape, dh.shape[1], routing.num_experts
    parts = cdiv(columns, _GATES)
    sums = dh.new_empty(parts, routing.num_pairs, dtype=torch.float32)
    dz = products if spend else torch.empty_like(products)
    of_rows, of_columns, of_h = (
        torch.zeros(shape, dtype=torch.int32, device=dh.device) if wanted else None
        for wanted, shape in (
            (needed.hidden_states, (rows,)), (needed.up, (experts, width)), (needed.down, (experts, columns))
        )
    )  # fmt: skip
    step, lead = (2, 1) if expert.interleaved else (1, columns)
    if dh.numel() and experts:
        gate_device.gradients[(routing.max_tiles * parts,)](
            dh, products, dz, weights.contiguous(), routing.tokens, routing.pairs, routing.tiles,
            routing.offsets, x.scale, grad.scale, of_rows, of_columns, of_h, sums, routing.max_tiles, columns,
            routing.num_pairs, width, step, lead, expert.limit, expert.alpha, routing.block, _GATES, _GROUP,
            expert.form, expert.activation, _SPAN, _ROWS, _STAGES, num_warps=_WARPS,
        )  # fmt: skip
    _, h = _cast(dh, grad, routing, None, of_h)
    weighted = dh if keep else None
    del dh
    as_rows, as_columns = _cast(dz, x, routing, of_rows, of_columns)
    if keep:
        return as_rows, as_columns, h, sums, dz, weighted
    memory = products.untyped_storage()
    if spend and memory.nbytes() == products.nbytes:  # it is not a part of somebody's, from a hook
        memory.resize_(0)
    return as_rows, as_columns, h, sums, None, None


def _cast(
    x: Tensor, factor: Cast, routing: Routing, of_rows: Tensor | None, of_columns: Tensor | None
) -> tuple[Cast | None, Cast | None]:
    """Return ``x`` [rows, columns], and its columns times the scales of ``factor``, or None.

    ``of_rows`` [rows] and ``of_columns`` [E, columns] are their largest numbers; None: that is not wanted.
    """
    (rows, columns), nothing, new = x.shape, (None, None), x.new_empty
    as_rows = as_columns = None
    if of_rows is not None:
        as_rows = Cast(new(rows, columns, dtype=FLOAT8), new(rows, 1, dtype=torch.float32))
    if of_columns is not None:
        # Nothing is written of experts without rows.
        values = new(columns, routing.max_tiles * routing.block, dtype=FLOAT8)
        as_columns = Cast(values, torch.zeros_like(of_columns, dtype=torch.float32))
    if x.numel() and routing.num_experts and (as_rows or as_columns):
        gate_device.cast[(routing.max_tiles * cdiv(columns, _CAST),)](
            x, factor.scale, routing.tokens, routing.tiles, of_rows, of_columns, *(as_rows or nothing),
            *(as_columns or nothing), routing.max_tiles, columns, routing.block, _CAST, _GROUP,
            num_warps=_WARPS,
        )  # fmt: skip
    return as_rows, as_columns


def input_gradient(dz: Cast, up: Tensor, routing: Routing, form: Form, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x, [tokens, H], for ``up`` [E, W, H].

    At a time, as many columns as a row of gate and up has.
    """
    width, hidden = up.shape[1:]
    out = up.new_empty(routing.num_tokens, hidden, dtype=dtype)
    for part in _parts(hidden, width):
        values, turned, _, scales = operands_of(dz, up[..., part], form, transposed=True)
        rows = triton_products.rows_product(values, turned, routing, scales=scales, to_input=True)
        del values, turned, scales
        triton_sums.combine(rows, routing, out=out[:, part])
        del rows
    return out


def _parts(columns: int, most: int) -> Iterator[slice]:
    """Equal parts of ``columns``, whole tiles but for the last, with at most ``most`` each, or one tile."""
    width = cdiv(cdiv(columns, cdiv(columns, max(1, most))), _TILE) * _TILE
    return (slice(first, min(first + width, columns)) for first in range(0, columns, width))


def weight_gradient(
    left: Cast | Tensor,
    right: Cast | Tensor,
    routing: Routing,
    *,
    gathered: tuple[bool, bool],
    dtype: torch.dtype,
    most: int | None = None,
) -> Tensor:
    """Return what `triton_products.weight_gradient` does, from products in float8.

    The ``gathered`` factor has rows of tokens, whose scales are in the other one, from `gate_gradients`. Its
    columns become rows, ``most`` at a time: each takes a byte for every row of experts. In MX both factors
    are tensors.
    """
    of_tokens = gathered.index(True)
    tokens, other = (left, right) if of_tokens == 0 else (right, left)
    x = tokens if isinstance(tokens, Tensor) else tokens.values
    columns, rows = x.shape[1], other.shape[1] if isinstance(other, Tensor) else other.values.shape[0]
    shape = (columns, rows) if of_tokens == 0 else (rows, columns)
    out = torch.empty(routing.num_experts, *shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    if routing.num_rows == 0:
        return out.zero_()
    as_rows = _turned_to_mx(other, routing, gathered=False) if isinstance(other, Tensor) else other
    turned: tuple[Tensor, Tensor | None]
    for part in _parts(columns, most or columns):
        if isinstance(other, Tensor):
            turned = _turned_to_mx(x[:, part], routing, gathered=True)
        else:
            turned = _turned(x[:, part], routing), None
        if of_tokens == 0:
            _multiply(turned, as_rows, out[:, part], routing)
        else:
            _multiply(as_rows, turned, out[..., part], routing)
        del turned
    return out


def _multiply(
    left: tuple[Tensor, Tensor | None], right: tuple[Tensor, Tensor | None], out: Tensor, routing: Routing
) -> None:
    """Write ``out`` [E, P, Q], any strides of E and P, from columns [P, bytes] and [Q, bytes] and scales."""
    (p, q), operands = out.shape[1:], [left[0], right[0]]
    tile = float8_weight_tile(left[0])
    blocks = (tile.rows, tile.columns)
    as_descriptors = all(describable(operand, tile) for operand in operands)
    if as_descriptors:
        operands = [
            described(operand, [block, tile.depth]) for operand, block in zip(operands, blocks, strict=True)
        ]
    tiles = routing.num_experts * cdiv(p, tile.rows) * cdiv(q, tile.columns)
    device.weight_gradient[grid(out, tile, tiles)](
        *operands, left[1], right[1], out, routing.experts, routing.max_tiles,
        routing.num_experts, p, q, *out.stride()[:2], routing.block, *blocks, tile.depth, tile.group,
        tile.stages, as_descriptors, tile.flatten, num_warps=tile.warps,
    )  # fmt: skip


def _turned(x: Tensor, routing: Routing) -> Tensor:
    """Return the rows of tokens ``x`` [tokens, columns], float8, as columns [columns, bytes]."""
    columns = x.shape[1]
    q = x.new_empty(columns, routing.max_tiles * routing.block)
    device.turned[routing.max_tiles, cdiv(columns, _COLUMNS)](
        x.view(torch.uint8), routing.tokens, routing.tiles, q,
        routing.max_tiles, columns, x.stride(0), routing.block, _COLUMNS, num_warps=8,
    )  # fmt: skip
    return q


def _turned_to_mx(x: Tensor, routing: Routing, *, gathered: bool) -> tuple[Tensor, Tensor]:
    """Return rows, or those of tokens, as columns in MX, [columns, bytes], and their scales."""
    columns, width = x.shape[1], routing.max_tiles * routing.block
    q = x.new_empty(columns, width, dtype=FLOAT8)
    scale = x.new_empty(columns, width // SHARED, dtype=torch.uint8)
    device.turned_to_mx[routing.max_tiles, cdiv(columns, _MX_COLUMNS)](
        x, routing.tokens, routing.tiles, q, scale,
        routing.max_tiles, columns, x.stride(0), routing.block, _MX_COLUMNS, gathered, num_warps=8,
    )  # fmt: skip
    return q, scale
