"""Attention by segment with the package flash-attn, where it is installed and chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from veomni_hook.kernels.varlen_attention.flash import packed

__all__ = ["full"]


def full(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention: Callable[..., object],
    options: Mapping[str, object],
) -> torch.Tensor:
    """Return attention within the segments; see `reference.full`."""
    from flash_attn import flash_attn_varlen_func

    *tensors, bounds, longest = packed(query, key, value, cu_seqlens)
    output: torch.Tensor = flash_attn_varlen_func(
        *tensors, bounds, bounds, longest, longest, softmax_scale=options.get("scaling")
    )
    return output.unsqueeze(0)
