"""Sums of rows at given places, with the kernel that sums the results of a token's experts."""

from __future__ import annotations

import torch

from veomni_hook.kernels.moe_experts import triton_products
from veomni_hook.kernels.moe_experts.triton_routing import Routing

__all__ = ["sum_places"]

Tensor = torch.Tensor


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
        tokens, width, rows.shape[0], 1, 0, 0, places, rows_of, rows_of, rows_of, rows_of, end, end
    )
    return triton_products.combine(rows.contiguous(), routing)
