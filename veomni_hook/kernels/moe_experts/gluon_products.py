"""Launches Gluon's kernels of experts' backward; `.gluon_choice` decides where.

They write what Triton's kernels return, see `.triton_products`, which allocates the results.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from veomni_hook.kernels.moe_experts.triton_routing import Routing
from veomni_hook.kernels.moe_experts.triton_tiles import Tile, grid
from veomni_hook.kernels.shared.launch import cdiv, enter_context

__all__ = ["BACKWARD_TILE", "gate_up_backward", "weight_gradient"]

Tensor = torch.Tensor

# Programs: one per multiprocessor, which a program's shared memory fills.
BACKWARD_TILE = Tile(128, 256, 64, 8, 3, parts=4)
_WEIGHT_TILE = Tile(128, 256, 64, 4, 4)
# Of each of 512 and of 384 threads. The kernels divide them between loading, multiplying and other warps.
_BACKWARD_REGISTERS, _WEIGHT_REGISTERS = 128, 168


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How descriptors place a block in shared memory."""
    # Other releases of Triton have no Gluon, and these modules are not imported there.
    from triton.experimental.gluon import language as gl

    of = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([*block], of)


def _described(tensor: Tensor, *block: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # see `_layout`

    enter_context(tensor)
    return TensorDescriptor.from_tensor(tensor, [*block], _layout(block, tensor.dtype))


def weight_gradient(
    left: Tensor, right: Tensor, out: Tensor, routing: Routing, gathered: tuple[bool, bool]
) -> None:
    """Write to ``out`` [E, P, Q] what `triton_products.weight_gradient` returns."""
    from veomni_hook.kernels.moe_experts import gluon_weight_gradient_device as device  # see `_layout`

    tile = _WEIGHT_TILE
    rows, wide = (left, right) if gathered[0] else (right, left)
    a, b = rows.shape[1], wide.shape[1]
    tiles = routing.num_experts * cdiv(a, tile.rows) * cdiv(b, tile.columns)
    device.weight_gradient[grid(rows, tile, tiles)](
        rows, _described(wide, tile.depth, tile.columns), _described(out, 1, 64, 64),
        routing.tokens, routing.experts, routing.num_experts, a, b, rows.stride(0),
        tile.rows, tile.columns, tile.depth, tile.stages, tile.group, gathered[1], a % tile.rows == 0,
        _layout((tile.depth, tile.rows), rows.dtype), _layout((64, 64), rows.dtype),
        num_warps=tile.warps, maxnreg=_WEIGHT_REGISTERS,
    )  # fmt: skip


def gate_up_backward(
    dout: Tensor,
    weight: Tensor,
    products: Tensor,
    gradients: Tensor,
    h: Tensor,
    partial: Tensor,
    routing: Routing,
    weights: Tensor,
    *,
    form: int,
    activation: int,
    paired: int,
    transposed: bool,
) -> None:
    """Write to ``gradients``, ``h`` and ``partial`` what `triton_products.gate_up_backward` returns.

    Args:
        dout: [tokens, H].
        weight: of the second product, [E, I, H], or [E, H, I] if ``transposed``.
        products: [rows, 2I] or [rows, I].
        gradients: like ``products``, or ``products`` itself.
        h: [rows, I].
        partial: [tiles of columns, rows], float32.
        routing: the call's routing.
        weights: the routing weights [tokens, top_k].
        form: the device code's number.
        activation: likewise.
        paired: likewise, for the order of gates and ups.
        transposed: see ``weight``.
    """
    from veomni_hook.kernels.moe_experts import gluon_backward_device as device  # see `_layout`

    tile = BACKWARD_TILE
    hidden, columns, dtype = dout.shape[1], h.shape[1], dout.dtype
    block = (tile.depth, tile.columns) if transposed else (tile.columns, tile.depth)
    device.gate_up_backward[grid(dout, tile, routing.max_tiles * partial.shape[0])](
        dout, _described(weight.view(-1, weight.shape[2]), *block), products, gradients, h, partial,
        routing.tokens, routing.pairs, weights, routing.tiles, routing.max_tiles, hidden, columns,
        routing.num_pairs, dout.stride(0),
        tile.rows, tile.columns, tile.depth, tile.stages, tile.group, transposed, paired, form, activation,
        _layout((tile.rows, tile.depth), dtype), _layout((tile.rows, 64), dtype),
        num_warps=tile.warps, maxnreg=_BACKWARD_REGISTERS,
    )  # fmt: skip
