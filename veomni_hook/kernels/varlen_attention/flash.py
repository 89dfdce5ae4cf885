"""Attention by segment in one call with the boundaries of all: torch's flash attention, or flash-attn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from veomni_hook.kernels.shared.host_values import derived
from veomni_hook.kernels.shared.operand_checks import dtype_of
from veomni_hook.kernels.varlen_attention.operand_checks import lengths_of
from veomni_hook.kernels.varlen_attention.torch import runs_of

__all__ = ["full", "full_by_package", "loses", "refuses", "unfit"]

#: Pairs of positions times columns of all heads, for a call of torch's fused attention. On an H200, 8 images
#: of 5,476 patches took 0.63 of the time of flash attention with boundaries, and 720 windows of two lengths
#: in turn 1.6 times as long. This is where a call's work covers its cost on the host.
_LEAST_WORK = 2e9

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST, _MULTIPLE = 256, 8
_OPERATOR = torch.ops.aten._flash_attention_forward


def full(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention: Callable[..., object],
    options: Mapping[str, object],
) -> torch.Tensor:
    """Return attention within the segments; see `reference.full`.

    Saved: query, key, value, the output, and the logarithm of each row's sum in float32.
    """
    *tensors, bounds, longest = _packed(query, key, value, cu_seqlens)
    output: torch.Tensor = _OPERATOR(
        *tensors, bounds, bounds, longest, longest, 0.0, False, False, scale=options.get("scaling")
    )[0]
    return output.unsqueeze(0)


def full_by_package(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention: Callable[..., object],
    options: Mapping[str, object],
) -> torch.Tensor:
    """Return the same with the package flash-attn."""
    from flash_attn import flash_attn_varlen_func

    *tensors, bounds, longest = _packed(query, key, value, cu_seqlens)
    output: torch.Tensor = flash_attn_varlen_func(
        *tensors, bounds, bounds, longest, longest, softmax_scale=options.get("scaling")
    )
    return output.unsqueeze(0)


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
) -> list[object]:
    """Return the tensors as ``[positions, heads, width]``, the int32 boundaries, and the longest length."""
    dtype = dtype_of(query)
    tensors = [each[0].to(dtype).transpose(0, 1) for each in (query, key, value)]
    bounds = cu_seqlens.to(device=query.device, dtype=torch.int32)
    return [*tensors, bounds, max(lengths_of(cu_seqlens))]


def refuses(
    owner: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: object
) -> str | None:
    """Return what the kernel refuses, beside `operand_checks`, or None."""
    if not torch._C._get_flash_sdp_enabled():
        return "flash attention is switched off in torch"
    return unfit(owner, query, key, value)


def loses(
    owner: object, query: torch.Tensor, key: object, value: object, cu_seqlens: torch.Tensor, *others: object
) -> str | None:
    """Return why calls for each run of segments are faster than one call, or None."""
    calls, pairs = derived(cu_seqlens, _calls)
    if calls > 1 and pairs * query.shape[1] * query.shape[3] < _LEAST_WORK * calls:
        return None
    return f"the segments' {calls} runs of one length are faster in as many calls"


def _calls(cu_seqlens: torch.Tensor) -> tuple[int, int]:
    """Return the runs of segments of one length, and the pairs of positions in segments."""
    runs = runs_of(cu_seqlens)
    return len(runs), sum(run.segments * run.length**2 for run in runs)


def unfit(
    owner: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: object
) -> str | None:
    """Return why flash attention cannot take these operands, beside `operand_checks`, or None."""
    if dtype_of(query) not in _DTYPES:
        return f"query is {dtype_of(query)}: flash attention needs half precision"
    width = query.shape[3]
    if width % _MULTIPLE or width > _WIDEST or value.shape[3] != width:
        return f"heads have {width} and {value.shape[3]} columns: flash attention needs one multiple of 8"
    if any(tensor.stride(3) != 1 for tensor in (query, key, value)):
        return "the columns of a head are not contiguous"
    return None if query.shape[2] else "there are no positions"
