"""Sums of experts' rows: over a token's places, over an expert's rows, and of a routing weight's gradient.

Sums are in float32, in order, and rounded once. Mutates: nothing.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from veomni_hook.kernels.moe_experts import routing_device
from veomni_hook.kernels.moe_experts.triton_routing import Routing
from veomni_hook.kernels.shared.launch import LAUNCHES, Launch, cdiv, power

__all__ = ["bias_gradient", "combine", "routing_gradient", "sum_places"]

Tensor = torch.Tensor

_COMBINED, _UNROLLED = 2048, 16
_SUM_ROWS, _SUM_COLUMNS = 32, 128
_PAIRS, _PAIR_COLUMNS = 32, 128


def combine(
    y: Tensor,
    routing: Routing,
    weights: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return [tokens, H]: for each token the sum of its rows of ``y``, times ``weights`` if given.

    Places are summed in order, in float32, and the sum is rounded once, to ``dtype`` or that of ``y``, or to
    that of ``out``, where it is written then: columns of a matrix.
    """
    columns = y.shape[1]
    if out is None:
        out = torch.empty(routing.num_tokens, columns, dtype=dtype or y.dtype, device=y.device)
    if routing.top_k == 0 or routing.num_experts == 0:
        return out.zero_()
    if out.numel():
        scale_or_y = y if weights is None else weights.contiguous()
        launch, block = _combine_launch(
            y.device, (y.dtype, out.dtype, scale_or_y.dtype), routing.num_experts, columns, out.stride(0),
            routing.top_k, weighted=weights is not None,
        )  # fmt: skip
        launch(
            (routing.num_tokens, cdiv(columns, block), 1),
            y, out, routing.rows_of, scale_or_y, routing.offsets, routing.num_experts, columns, out.stride(0),
        )  # fmt: skip
    return out


@lru_cache(maxsize=LAUNCHES)
def _combine_launch(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    num_experts: int,
    columns: int,
    stride: int,
    top_k: int,
    *,
    weighted: bool,
) -> tuple[Launch, int]:
    """Return the launcher of `combine` for these Triton specialisations, and the columns per program."""
    block = min(_COMBINED, power(columns))
    constants = top_k, top_k <= _UNROLLED, block, weighted
    warps = max(1, min(4, block // 256))
    return Launch(routing_device.combine, 5, *constants, num_warps=warps), block


def routing_gradient(
    partial: Tensor, weights: Tensor, routing: Routing, dout: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the gradient of ``weights`` [tokens, top_k] from the sums of `triton_products.gate_up_backward`.

    ``bias`` is that of the second product.
    """
    gradient = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    if routing.num_experts == 0:
        return gradient.zero_()
    if gradient.numel():
        routing_device.routing_gradient[(cdiv(routing.num_pairs, _PAIRS),)](
            partial, gradient, routing.rows_of, routing.offsets, routing.ids, dout,
            dout if bias is None else bias.contiguous(),
            routing.num_experts, partial.shape[0], routing.num_pairs, dout.shape[1], dout.stride(0),
            routing.top_k, _PAIRS, _PAIR_COLUMNS, bias is not None,
        )  # fmt: skip
    return gradient


def bias_gradient(
    x: Tensor,
    routing: Routing,
    weights: Tensor | None = None,
    *,
    gather: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return [E, columns], for each expert the sum of its rows of ``x``, times ``weights`` if given.

    ``x`` has one row per token if ``gather``, else one per pair.
    """
    columns = x.shape[1]
    out = torch.empty(routing.num_experts, columns, dtype=dtype or x.dtype, device=x.device)
    if routing.num_rows == 0:
        return out.zero_()
    if out.numel():
        routing_device.column_sums[(routing.num_experts, cdiv(columns, _SUM_COLUMNS))](
            x, out, routing.tokens, routing.pairs, x if weights is None else weights.contiguous(),
            routing.offsets, columns, x.stride(0), _SUM_ROWS, _SUM_COLUMNS, gather, weights is not None,
        )  # fmt: skip
    return out


def sum_places(rows: Tensor, places: Tensor) -> Tensor:
    """Return ``[tokens, width]``: the sum of the rows of ``rows`` at each token's ``places``, in float32.

    ``places`` is int32 ``[tokens, places]``; numbers from ``rows.shape[0]`` on add nothing. Sums are rounded
    once, to the dtype of ``rows``.
    """
    tokens, width = places.shape
    # The kernel reads the end of the rows from a table, so that nothing depends on the host.
    end = torch.full((2,), rows.shape[0], dtype=torch.int32, device=rows.device)
    rows_of = places.reshape(-1)
    routing = Routing(
        tokens, width, rows.shape[0], 1, 0, 0, places, rows_of, rows_of, rows_of, rows_of, end, end, end
    )
    return combine(rows.contiguous(), routing)
