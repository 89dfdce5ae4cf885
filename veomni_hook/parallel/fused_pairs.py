"""Pairs of queries and keys by torch's flash attention, which knows the logsumexp of their scores.

Its backward computes weights from the logsumexp over the keys of all processes, so the gradients of a pair
are those of the whole.
"""

from __future__ import annotations

import torch

from veomni_hook.accelerator import is_rocm
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing

__all__ = ["attend", "fits", "gradients"]

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST, _MULTIPLE = 256, 8
_CAPABILITY = (8, 0)


def fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether flash attention takes a pair without mask and softcap; keys are as wide as queries."""
    width = query.shape[3]
    return (
        query.device.type == "cuda"
        and query.dtype in _DTYPES
        and width % _MULTIPLE == 0
        and width <= _WIDEST
        and value.shape[3] == width
        and _is_there()
    )


@answered_while_tracing
def _is_there() -> bool:
    switched_on: bool = torch._C._get_flash_sdp_enabled()
    return switched_on and not is_rocm() and torch.cuda.get_device_capability() >= _CAPABILITY


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, *, triangle: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output ``[batch, heads, queries, width]`` and the logsumexp ``[batch, heads, queries]``."""
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, triangle, scale=scaling
    )[:2]
    return output, logsumexp


def gradients(  # noqa: PLR0913 - what the operator needs
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    scaling: float,
    *,
    triangle: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a pair; output and logsumexp are those over the keys of all processes."""
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # without dropout
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, output, logsumexp.contiguous(),
        None, None, query.shape[2], key.shape[2], 0.0, triangle, unused, unused, scale=scaling,
    )  # fmt: skip
    return of_query, of_key, of_value
