"""Low-rank adapters of experts' products in Triton: the building blocks, as plain functions.

`triton` has the formulas. A product's kernel adds the adapter after its own sum, so that the adapter makes no
pass of its own over the product's result; what it reads of a product's input, `low_of` makes first.
Shapes: the rank is padded to `padded_rank`. Mutates: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from veomni_hook.kernels.moe_experts import adapter_device, triton_products
from veomni_hook.kernels.moe_experts.low_rank import Factors, padded
from veomni_hook.kernels.moe_experts.triton_products import Low
from veomni_hook.kernels.moe_experts.triton_routing import Routing
from veomni_hook.kernels.moe_experts.triton_tiles import Tile, grid
from veomni_hook.kernels.shared.launch import power

__all__ = [
    "MOST_RANK",
    "Adapter",
    "adapter",
    "factor_gradients",
    "kept_lows",
    "low_of",
    "padded_rank",
    "weighted_rows",
]

Tensor = torch.Tensor

#: A product's kernel unrolls the rank.
MOST_RANK = 512
_LEAST_RANK = 16


def padded_rank(rank: int) -> int:
    """Return the rank that the device code computes with."""
    return max(_LEAST_RANK, power(rank))


class Adapter(NamedTuple):
    """An adapter in the dtype of the products, with a padded rank.

    Attributes:
        into: ``[E, RANK, in]``, contiguous.
        out: ``[E, out, RANK]``, contiguous.
        scale: its factor, which `low_of` multiplies with.
        rank: before padding.
        dtypes: of the factors as they were given.
    """

    into: Tensor
    out: Tensor
    scale: float
    rank: int
    dtypes: tuple[torch.dtype, torch.dtype]


def adapter(factors: Factors | None, dtype: torch.dtype) -> Adapter | None:
    """Return the factors in ``dtype``; None for None."""
    if factors is None:
        return None
    rank = factors.into.shape[1]
    copies = padded(factors, dtype, padded_rank(rank))
    return Adapter(*copies, factors.scale, rank, (factors.into.dtype, factors.out.dtype))


def low_of(
    adapted: Adapter | None, x: Tensor, routing: Routing, *, ordered: bool, back: bool = False
) -> Low | None:
    """Return what a product of ``x`` [tokens, in], or [rows, in] if ``ordered``, adds to its result.

    ``back``: ``x`` is a gradient of results, and the result the gradient of the product's input.
    """
    if adapted is None:
        return None
    matrix, behind = (adapted.out.transpose(1, 2), adapted.into) if back else (adapted.into, adapted.out)
    rank, inner = matrix.shape[1:]
    # The scale times the rows of x times their expert's matrix [E, RANK, in].
    rows = torch.empty(routing.num_rows, rank, dtype=x.dtype, device=x.device)
    if rows.numel() and routing.num_experts:
        narrow = x.element_size() == 4
        tile = Tile(routing.block, min(rank, 128), 32 if narrow else 64, 4, 2 if narrow else 4, programs=0)
        adapter_device.low_rows[grid(x, tile, routing.max_tiles * (rank // tile.columns))](
            x, matrix, rows, routing.tokens, routing.tiles, routing.max_tiles, inner,
            x.stride(0), *matrix.stride(), float(adapted.scale),
            tile.rows, tile.depth, tile.stages, rank, ordered, inner % tile.depth == 0, num_warps=tile.warps,
        )  # fmt: skip
    return Low(rows, behind, turned=back)


def kept_lows(
    of_up: Adapter | None, of_down: Adapter | None, rows: Sequence[Tensor | None]
) -> tuple[Low | None, Low | None]:
    """Return what `low_of` returned for both products of the forward, from rows that were kept, if any."""
    up, down = rows or (None, None)
    return (
        None if of_up is None or up is None else Low(up, of_up.out, turned=False),
        None if of_down is None or down is None else Low(down, of_down.out, turned=False),
    )


def weighted_rows(low: Low | None, routing: Routing, weights: Tensor) -> Low | None:
    """Return ``low`` with each row times its pair's routing weight."""
    if low is None:
        return None
    share = weights.reshape(-1, 1).index_select(0, routing.pairs[: routing.num_rows])
    return low._replace(rows=(low.rows * share).to(low.rows.dtype))


def factor_gradients(
    inputs: Tensor,
    outputs: Tensor,
    low: Low | None,
    back: Low | None,
    adapted: Adapter | None,
    routing: Routing,
    needed: Sequence[bool],
    gathered: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of an adapter's factors, those that are ``needed``.

    Args:
        inputs: of the product.
        outputs: the gradients of its results.
        low: of the forward.
        back: of the backward.
        adapted: the adapter; None has no gradients.
        routing: the call's routing.
        needed: for each factor, whether its gradient is.
        gathered: whether inputs and outputs have one row per token.
    """
    to_into = to_out = None
    if adapted is None or low is None or back is None:
        return None, None
    rank, (into, out) = adapted.rank, adapted.dtypes
    if needed[0]:
        rows = (False, gathered[0])
        to_into = _factor_gradient(back.rows, inputs, routing, rows, into)[:, :rank].contiguous()
    if needed[1]:
        rows = (gathered[1], False)
        to_out = _factor_gradient(outputs, low.rows, routing, rows, out)[..., :rank].contiguous()
    return to_into, to_out


def _factor_gradient(
    left: Tensor, right: Tensor, routing: Routing, gathered: tuple[bool, bool], dtype: torch.dtype
) -> Tensor:
    """Return [E, P, Q], for each expert ``left^T right`` over its rows; one of them has RANK columns."""
    narrow = left.element_size() == 4
    rows, columns = (
        max(_LEAST_RANK, min(64 if narrow else 128, power(tensor.shape[1]))) for tensor in (left, right)
    )
    # Two loads of a gathered operand depend on each other: of six stages, four hold its slabs.
    depth, stages = (32, 2) if narrow else (64, 6 if any(gathered) else 4)
    tile = Tile(rows, columns, depth, 4, stages, group=1, programs=0, described=False)
    return triton_products.weight_gradient(left, right, routing, gathered=gathered, dtype=dtype, tile=tile)
