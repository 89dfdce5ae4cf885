"""Experts' products in Triton: the building blocks of forward and backward, as plain functions.

Forward:  h = act(gate) * up, [gate, up] = x[token] Wgu_e^T (+ b); y = h Wd_e^T (+ b); out_t = sum_k w y
Backward: dh = w dout[token] Wd_e; [dgate, dup] may overwrite [gate, up]; dw = sum((dout[token] Wd_e) * h)
          dx_t = sum_k [dgate, dup] Wgu_e; dWd_e = dout[token]^T (w h); dWgu_e = [dgate, dup]^T x[token]
Shapes: x, out, dout [tokens, H]; h [rows, I]; gate and up [rows, 2I], in the order of the weight's rows;
        y [rows, H]; weights [E, out, in], or [E, in, out] where ``transposed``; biases [E, out].
Float32: sums of products, biases, the activation between its rounded operands and its rounded result, routing
weights, the sum over a token's places. Operands of products are 16-bit, or float32 (slow, without tf32).
Mutates: `gate_up_backward` its ``products`` on request, nothing else. Rows without an expert are never
written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from veomni_hook.kernels.moe_experts import (
    device,
    gluon_choice,
    gluon_products,
    triton_tiles,
    weight_gradient_device,
)
from veomni_hook.kernels.moe_experts.triton_routing import Routing
from veomni_hook.kernels.moe_experts.triton_tiles import Tile, describable, described, grid
from veomni_hook.kernels.shared.launch import cdiv

__all__ = [
    "Expert",
    "Low",
    "gate_up",
    "gate_up_backward",
    "ordered",
    "rows_product",
    "weight_gradient",
]

Tensor = torch.Tensor

_UNPAIRED, _ALL_BEFORE, _ALTERNATING = 0, 1, 2


class Expert(NamedTuple):
    """What an expert computes and how its weights are stored.

    Attributes:
        form: number of the gated form, as in `veomni_hook.kernels.gated_mlp.device`.
        activation: number of the activation, likewise.
        limit: limit of gate and up, if the form has one.
        alpha: factor in the sigmoid, if the form has one.
        transposed: weights are [E, in, out].
        interleaved: each gate is followed by its up; else all gates come before all ups.
        alone: there is a gate and no up.
    """

    form: int
    activation: int
    limit: float = 0.0
    alpha: float = 0.0
    transposed: bool = False
    interleaved: bool = False
    alone: bool = False

    @property
    def paired(self) -> int:
        """The device code's number for the order of gates and ups."""
        if self.alone:
            return _UNPAIRED
        return _ALTERNATING if self.interleaved else _ALL_BEFORE


class Low(NamedTuple):
    """What a product adds to its result: ``rows`` times the expert's ``matrix``; RANK is a power of two.

    Attributes:
        rows: [rows, RANK], contiguous.
        matrix: [E, columns, RANK], or [E, RANK, columns] if ``turned``, contiguous.
        turned: how ``matrix`` is stored.
    """

    rows: Tensor
    matrix: Tensor
    turned: bool


class Scales(NamedTuple):
    """What a product of float8 operands is multiplied by, and the dtype of its result.

    Attributes:
        rows: float32, one for each row of x; in MX bytes [rows, inner / 32].
        columns: [E, columns], float32, one for each column of the product; in MX [E, columns, inner / 32].
        dtype: bfloat16, float16 or float32.
    """

    rows: Tensor
    columns: Tensor
    dtype: torch.dtype


def _more(low: Low | None, scales: Scales | None) -> dict[str, Any]:
    """The kernels' last arguments."""
    more: dict[str, Any] = {}
    if low is not None:
        more |= {"low": low.rows, "low_w": low.matrix, "RANK": low.rows.shape[1], "TURNED": low.turned}
    if scales is not None:
        scaled = 2 if scales.rows.dtype is torch.uint8 else 1
        more |= {"x_scale": scales.rows, "w_scale": scales.columns, "SCALED": scaled}
    return more


def _flatten(tile: Tile, low: Low | None) -> bool:
    """Whether to merge the loops over tiles and depth; with a `Low` that cost 7 % on an H200, at rank 16."""
    return tile.flatten and low is None


def _described_weight(weight: Tensor, transposed: bool, paired: int, tile: Tile) -> Any:
    """A descriptor of the weight's tiles, or None; ``weight`` in its storage layout."""
    if not describable(weight, tile) or (transposed and paired == _ALL_BEFORE):
        return None
    wide = tile.columns * (2 if paired else 1)
    if transposed:
        return described(weight, [1, tile.depth, wide])
    if paired == _ALL_BEFORE:
        # An expert's gates and ups as two matrices: one block holds the same columns of both.
        experts, rows, inner = weight.shape
        halves = weight.view(experts * 2, rows // 2, inner) if weight.is_contiguous() else None
        return halves if halves is None else described(halves, [2, tile.columns, tile.depth])
    return described(weight, [1, wide, tile.depth])


def _described_rows(x: Tensor, tile: Tile) -> Any:
    """A descriptor of tiles of rows in experts' order, or None."""
    return described(x, [tile.rows, tile.depth]) if describable(x, tile) else None


def _inner_last(weight: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Strides between experts, between columns of the result, and along the sum."""
    expert, first, second = weight.stride()
    return (expert, second, first) if transposed else (expert, first, second)


def _even(tile: Tile, inner: int, columns: int, described: object) -> bool:
    return inner % tile.depth == 0 and (described is not None or columns % tile.columns == 0)


def ordered(x: Tensor, routing: Routing) -> Tensor:
    """Return a copy of ``x`` [tokens, columns] in experts' order: [rows, columns]."""
    return x.index_select(0, routing.tokens[: routing.num_rows])


def gate_up(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Routing,
    expert: Expert,
    *,
    keep: bool,
    ordered: bool = False,
    tile: Tile | None = None,
    low: Low | None = None,
    scales: Scales | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``h`` [rows, I] and, if ``keep``, gate and up [rows, 2I] (or gate [rows, I]) as in the weight.

    ``x`` [tokens, H], or [rows, H] if ``ordered``, has the dtype of ``weight``. Any row stride is allowed;
    elements of a row must be contiguous.
    """
    hidden = x.shape[1]
    paired = expert.paired
    width = weight.shape[2 if expert.transposed else 1]
    columns = width // 2 if paired else width
    tile = tile or triton_tiles.product_tile("gate_up" if paired else "down", routing.block, x)
    dtype = x.dtype if scales is None else scales.dtype
    h = torch.empty(routing.num_rows, columns, dtype=dtype, device=x.device)
    products = torch.empty(routing.num_rows, width, dtype=dtype, device=x.device) if keep else None
    if h.numel() == 0 or routing.num_experts == 0:
        return h, products
    w_descriptor = _described_weight(weight, expert.transposed, paired, tile)
    x_descriptor = _described_rows(x, tile) if ordered else None
    device.gate_up[grid(x, tile, routing.max_tiles * cdiv(columns, tile.columns))](
        x if x_descriptor is None else x_descriptor,
        weight if w_descriptor is None else w_descriptor,
        h if bias is None else bias.contiguous(), h, h if products is None else products,
        routing.tokens, routing.tiles, routing.max_tiles, hidden, columns,
        x.stride(0), *_inner_last(weight, expert.transposed), expert.limit, expert.alpha,
        tile.rows, tile.columns, tile.depth, tile.group, tile.stages, paired, expert.transposed, ordered,
        x_descriptor is not None, w_descriptor is not None, _even(tile, hidden, columns, w_descriptor),
        bias is not None, keep, expert.form, expert.activation, _flatten(tile, low),
        num_warps=tile.warps, **_more(low, scales),
    )  # fmt: skip
    return h, products


def rows_product(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    transposed: bool = False,
    low: Low | None = None,
    scales: Scales | None = None,
    gathered: bool = False,
    to_input: bool = False,
) -> Tensor:
    """Return [rows, columns]: each row of ``x`` times its expert's matrix.

    Of ``h`` and the second weight these are the rows y; of the gradients of gate and up and the first weight
    the rows whose sums over places are the gradient of x; of dout and the second weight the gradient of h
    without routing weights.

    Args:
        x: [rows, inner], contiguous; if ``gathered`` [tokens, inner].
        weight: [E, columns, inner], or [E, inner, columns] if ``transposed``.
        routing: the call's routing.
        bias: [E, columns].
        weights: [tokens, top_k], of any float dtype; applied before the only rounding.
        transposed: see ``weight``.
        low: added to the result.
        scales: of ``x`` and ``weight``, if they are cast.
        gathered: see ``x``.
        to_input: the result is for the gradient of x, which has another configuration in float8.
    """
    inner = x.shape[1]
    columns = weight.shape[2 if transposed else 1]
    tile = triton_tiles.product_tile("input_gradient" if to_input else "down", routing.block, x)
    dtype = x.dtype if scales is None else scales.dtype
    y = torch.empty(routing.num_rows, columns, dtype=dtype, device=x.device)
    if y.numel() == 0 or routing.num_experts == 0:
        return y
    w_descriptor = _described_weight(weight, transposed, 0, tile)
    x_descriptor = None if gathered else _described_rows(x, tile)
    even = _even(tile, inner, columns, w_descriptor)
    device.rows_product[grid(x, tile, routing.max_tiles * cdiv(columns, tile.columns))](
        x if x_descriptor is None else x_descriptor,
        weight if w_descriptor is None else w_descriptor,
        y if bias is None else bias.contiguous(), y,
        routing.tokens, routing.pairs, y if weights is None else weights.contiguous(),
        routing.tiles, routing.max_tiles, inner, columns, *_inner_last(weight, transposed),
        tile.rows, tile.columns, tile.depth, tile.group, tile.stages,
        transposed, not gathered, x_descriptor is not None, w_descriptor is not None, even,
        bias is not None, weights is not None, _flatten(tile, low),
        num_warps=tile.warps, **_more(low, scales),
    )  # fmt: skip
    return y


def gate_up_backward(
    dout: Tensor,
    weight: Tensor,
    products: Tensor,
    routing: Routing,
    weights: Tensor,
    expert: Expert,
    *,
    spend: bool,
    ordered: bool = False,
    tile: Tile | None = None,
    low: Low | None = None,
    scales: Scales | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of gate and up from the gradient of the result.

    Args:
        dout: the result's gradient, [tokens, H], or [rows, H] if ``ordered``; any row stride.
        weight: weight of the second product, as stored.
        products: [rows, 2I], kept by `gate_up`.
        routing: the call's routing.
        weights: the routing weights [tokens, top_k].
        expert: as in the forward.
        spend: overwrite gate and up in ``products`` with their gradients.
        ordered: ``dout`` is in experts' order.
        tile: a configuration; by default chosen by shape.
        low: added to the gradient of h.
        scales: of ``dout`` and ``weight``, if they are cast.

    Returns:
        The gradients of gate and up [rows, 2I], the routing weight times h [rows, I] for the gradient of
        ``weight``, and sums for `triton_sums.routing_gradient`.
    """
    hidden = dout.shape[1]
    columns = products.shape[1] // 2 if expert.paired else products.shape[1]
    gradients = products if spend else torch.empty_like(products)
    by_gluon = not (tile or low or ordered or scales) and not gluon_choice.gate_up_backward_refuses(
        dout, weight, products, routing, form=expert.form, paired=expert.paired
    )
    if by_gluon:
        tile = gluon_products.BACKWARD_TILE
    tile = tile or triton_tiles.gradient_tile(routing.block, dout, transposed=expert.transposed)
    h = torch.empty(routing.num_rows, columns, dtype=products.dtype, device=dout.device)
    parts = cdiv(columns, tile.columns)
    partial = torch.empty(parts, routing.num_pairs, dtype=torch.float32, device=dout.device)
    if h.numel() == 0 or routing.num_experts == 0:
        return gradients, h, partial
    if by_gluon:
        gluon_products.gate_up_backward(
            dout, weight, products, gradients, h, partial, routing, weights.contiguous(),
            form=expert.form, activation=expert.activation, paired=expert.paired,
            transposed=not expert.transposed,
        )  # fmt: skip
        return gradients, h, partial
    # The sum runs over the forward's result columns.
    w_descriptor = _described_weight(weight, not expert.transposed, 0, tile)
    dout_descriptor = _described_rows(dout, tile) if ordered else None
    device.gate_up_backward[grid(dout, tile, routing.max_tiles * parts)](
        dout if dout_descriptor is None else dout_descriptor,
        weight if w_descriptor is None else w_descriptor,
        products, gradients, h, partial, routing.tokens, routing.pairs, weights.contiguous(),
        routing.tiles, routing.max_tiles, hidden, columns, routing.num_pairs,
        dout.stride(0), *_inner_last(weight, not expert.transposed), expert.limit, expert.alpha,
        tile.rows, tile.columns, tile.depth, tile.group, tile.stages,
        expert.paired, not expert.transposed, ordered, dout_descriptor is not None, w_descriptor is not None,
        _even(tile, hidden, columns, w_descriptor), tile.parts, expert.form, expert.activation, tile.flatten,
        num_warps=tile.warps, **_more(low, scales),
    )  # fmt: skip
    return gradients, h, partial


def weight_gradient(
    left: Tensor,
    right: Tensor,
    routing: Routing,
    *,
    gathered: tuple[bool, bool],
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return [E, P, Q], for each expert ``left^T right`` over its rows; zeros if it has none.

    ``left`` [.., P] and ``right`` [.., Q] have one row per pair. One of them may be ``gathered``: it has one
    row per token.
    """
    p, q = left.shape[1], right.shape[1]
    out = torch.empty(routing.num_experts, p, q, dtype=dtype or left.dtype, device=left.device)
    if out.numel() == 0:
        return out
    if routing.num_rows == 0:
        return out.zero_()
    if (
        tile is None
        and gluon_choice.weight_gradient_refuses(left, right, routing, gathered, out.dtype) is None
    ):
        gluon_products.weight_gradient(left, right, out, routing, gathered)
        return out
    tile = tile or triton_tiles.weight_tile(left, right, gathered)
    blocks = (tile.rows, tile.columns)
    descriptors: list[Any] = [None, None]
    for number, operand in enumerate((left, right)):
        if not gathered[number] and describable(operand, tile):
            descriptors[number] = described(operand, [tile.depth, blocks[number]])
    tiles = routing.num_experts * cdiv(p, tile.rows) * cdiv(q, tile.columns)
    weight_gradient_device.weight_gradient[grid(left, tile, tiles)](
        left, left if descriptors[0] is None else descriptors[0],
        right, right if descriptors[1] is None else descriptors[1], out,
        routing.tokens, routing.experts, routing.num_experts, p, q, left.stride(0), right.stride(0),
        tile.rows, tile.columns, tile.depth, tile.group, tile.stages, *gathered,
        descriptors[0] is not None, descriptors[1] is not None,
        p % tile.rows == 0 and q % tile.columns == 0, num_warps=tile.warps,
    )  # fmt: skip
    return out
