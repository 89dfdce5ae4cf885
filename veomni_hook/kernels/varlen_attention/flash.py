"""Attention by segment with torch's flash attention: one call, which takes the boundaries of all segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from veomni_hook.kernels.varlen_attention import operand_checks
from veomni_hook.kernels.varlen_attention.operand_checks import dtype_of, lengths_of

__all__ = ["full", "packed", "refuses", "unfit"]

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST, _MULTIPLE = 256, 8
_OPERATOR = torch.ops.aten._flash_attention_forward


def full(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention: Callable[..., Any],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Return attention within the segments; see `reference.full`.

    Saved: query, key, value, the output, and the logarithm of each row's sum in float32.
    """
    *tensors, bounds, longest = packed(query, key, value, cu_seqlens)
    output: torch.Tensor = _OPERATOR(
        *tensors, bounds, bounds, longest, longest, 0.0, False, False, scale=options.get("scaling")
    )[0]
    return output.unsqueeze(0)


def packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
) -> list[Any]:
    """Return the tensors as ``[positions, heads, width]``, the int32 boundaries, and the longest length."""
    dtype = dtype_of(query)
    tensors = [each[0].to(dtype).transpose(0, 1) for each in (query, key, value)]
    bounds = cu_seqlens.to(device=query.device, dtype=torch.int32)
    return [*tensors, bounds, max(lengths_of(cu_seqlens))]


def refuses(owner: Any, query: Any, key: Any, value: Any, *others: Any) -> str | None:
    """Return why this call must run another kernel or the upstream code, or None."""
    if (reason := operand_checks.refuses(owner, query, key, value, *others)) is not None:
        return reason
    if torch.version.hip is not None:
        return "torch's flash attention with boundaries was not checked on ROCm"
    if not torch._C._get_flash_sdp_enabled():
        return "flash attention is switched off in torch"
    return unfit(query, key, value)


def unfit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return why flash attention cannot take these operands, or None."""
    if dtype_of(query) not in _DTYPES:
        return f"query is {dtype_of(query)}: flash attention needs half precision"
    width = query.shape[3]
    if width % _MULTIPLE or width > _WIDEST or value.shape[3] != width:
        return f"heads have {width} and {value.shape[3]} columns: flash attention needs one multiple of 8"
    if any(each.stride(3) != 1 for each in (query, key, value)):
        return "the columns of a head are not contiguous"
    return None if query.shape[2] else "there are no positions"
