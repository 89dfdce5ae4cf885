"""Attention by segment with the package flash-attn, where it is installed and chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from veomni_hook.kernels.varlen_attention import operand_checks
from veomni_hook.kernels.varlen_attention.flash import unfit
from veomni_hook.kernels.varlen_attention.operand_checks import dtype_of, lengths_of

__all__ = ["full", "refuses"]


def full(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention: Callable[..., Any],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Return attention within the segments; see `reference.full`."""
    from flash_attn import flash_attn_varlen_func

    dtype = dtype_of(query)
    q, k, v = (each[0].to(dtype).transpose(0, 1) for each in (query, key, value))
    bounds = cu_seqlens.to(device=query.device, dtype=torch.int32)
    longest = max(lengths_of(cu_seqlens))
    output: torch.Tensor = flash_attn_varlen_func(
        q, k, v, bounds, bounds, longest, longest, softmax_scale=options.get("scaling")
    )
    return output.unsqueeze(0)


def refuses(
    owner: Any,
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens: Any,
    attention: Callable[..., Any],
    options: Mapping[str, Any],
) -> str | None:
    """Return why this call must run another kernel or the upstream code, or None."""
    reason = operand_checks.refuses(owner, query, key, value, cu_seqlens, attention, options)
    return reason if reason is not None else unfit(query, key, value)
